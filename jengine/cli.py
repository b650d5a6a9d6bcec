"""The `jengine` command."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from jengine import JengineError, __version__
from jengine.commands.terminal import write
from jengine.vllm.flags import Parser

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
COMMANDS = {  # in the order of the help, with the modules of jengine.commands that have them
    "run": "run", "generate": "generate", "chat": "chat", "serve": "serve", "pull": "run",
    "explain": "explain", "trace": "explain", "profile": "explain", "convert": "compile",
    "compile": "compile", "plan": "plan", "simulate": "simulate", "tune": "simulate", "verify": "verify",
    "bench": "bench", "cache": "cache",
}  # fmt: skip
SHELLS = """\
bash:  jengine completions bash > ~/.local/share/bash-completion/completions/jengine
zsh:   jengine completions zsh > ~/.zfunc/_jengine    (a folder of $fpath, before compinit runs)
fish:  jengine completions fish > ~/.config/fish/completions/jengine.fish
"""
FILES, FOLDERS = ("FILE", "MODEL"), ("DIR",)  # metavars
LATER_PROGRAMS = "programs"  # name of the thread; see execution/background.py


def main(arguments: list[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0, the command's own, or 2 for invalid input. Ctrl-C ends the
    process with 130."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _parser(*words[:1]).parse_args(words)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides XLA's notices and warnings, but not its errors
    # hides gRPC's log; callers get relevant errors as exceptions
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run: Callable[[argparse.Namespace], int | None] = options.run
    before = signal.signal(signal.SIGINT, _leave)
    try:
        return run(options) or 0
    except JengineError as error:
        print(f"jengine: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(
            f"jengine: error: {error.strerror}" + (f": {error.filename}" if error.filename else ""),
            file=sys.stderr,
        )
        _discard_output()
        return 2
    finally:
        signal.signal(signal.SIGINT, before)


def run_process() -> NoReturn:
    """The command of this process. At its end it does not wait for programs that threads still load or
    compile, which nobody will use: XLA cannot be interrupted, and the interpreter would wait for the threads.
    """
    code = main()
    if any(thread.name == LATER_PROGRAMS for thread in threading.enumerate()):
        # exit handlers save what is left, except JAX's, which frees what compilations use
        if (clean_up := getattr(sys.modules.get("jax._src.api"), "clean_up", None)) is not None:
            atexit.unregister(clean_up)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _discard_output() -> None:
    """Prevents a second error at exit when stdout's buffer is flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(*_: object) -> NoReturn:
    """Exits immediately. A KeyboardInterrupt would first wait for compilations in threads, for ten seconds or
    more.
    """
    os.write(sys.stderr.fileno(), b"\n")  # moves the shell's prompt to a new line
    os._exit(130)


def _parser(command: str = "") -> argparse.ArgumentParser:
    """Only that command, without importing the others; all of them if there is none of this name."""
    parser = Parser(prog="jengine", description="An LLM inference engine compiled by JAX/XLA.")
    parser.add_argument("--version", action="version", version=f"jengine {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())  # without a command
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(metavar="COMMAND")
    for name in [command] if command in COMMANDS else COMMANDS:
        getattr(import_module(f"jengine.commands.{COMMANDS[name]}"), f"add_{name}")(commands)
    if command not in COMMANDS:
        _add_completions(commands, parser)
    return parser


def _add_completions(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "completions",
        help="print a shell completion script",
        description="Print a script that completes jengine's commands, options and file names.",
        epilog=SHELLS,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=lambda options: _print_completions(whole, commands, options.shell))


def _print_completions(
    whole: argparse.ArgumentParser, commands: argparse._SubParsersAction[argparse.ArgumentParser], shell: str
) -> None:
    import shtab

    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar in FILES + FOLDERS:
                action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    write(shtab.complete(whole, shell=shell))


if __name__ == "__main__":
    run_process()
