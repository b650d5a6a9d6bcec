"""The `jengine` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jengine import JengineError, __version__
from jengine.commands import chat, compile, convert, generate, plan, serve


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 for bad input. Ctrl-C ends the process with 130."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notices and warnings; errors still show
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's: what matters of them, its callers get as errors
    run: Callable[[argparse.Namespace], None] = options.run
    before = signal.signal(signal.SIGINT, _leave)
    try:
        run(options)
        return 0
    except JengineError as error:
        print(f"jengine: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has enough; what is still buffered must not fail at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> NoReturn:
    """At once. A KeyboardInterrupt would first wait for the programs that threads are compiling, for ten seconds or more."""
    os.write(sys.stderr.fileno(), b"\n")  # so that the shell's prompt does not follow a half-drawn bar or sentence
    os._exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jengine", description="An LLM inference engine, compiled before the first request.")
    parser.add_argument("--version", action="version", version=f"jengine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (generate, chat, serve, convert, compile, plan):
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
