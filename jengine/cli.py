"""The `jengine` command."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from jengine import EngineConfig, JengineError, SamplingParams, __version__

_LOADED = time.monotonic()  # stands in for the process's start where /proc is missing

# Where `generate` differs from SamplingParams: long enough to read, varied enough not to loop.
GENERATE_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 256}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, or 2 for bad input. Ctrl-C ends the process with 130."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notices and warnings; errors still show
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
    _add_generate(commands)
    return parser


# --- generate -----------------------------------------------------------------------------------


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        help="complete a prompt, streaming to the terminal",
        description="Complete a prompt, streaming the text to stdout as it comes; progress and statistics go to stderr.",
    )
    generate.add_argument("model", metavar="MODEL", help="`demo`, a folder in Hugging Face's layout, or a hub id")
    generate.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    generate.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    generate.add_argument("--no-stats", action="store_true", help="no closing line of statistics")
    generate.add_argument("--quiet", action="store_true", help="no statistics and no progress bars")
    add_fields(generate.add_argument_group("sampling"), SamplingParams, defaults=GENERATE_DEFAULTS)
    # One prompt has one seed: --seed above. The engine's, from which requests draw theirs, would change nothing more.
    add_fields(generate.add_argument_group("engine"), EngineConfig, skip=("model", "seed"))
    generate.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    sampling = {**GENERATE_DEFAULTS, **given_fields(options, SamplingParams)}
    params = SamplingParams(**sampling)
    engine_options = given_fields(options, EngineConfig, skip=("model", "seed"))
    EngineConfig.of(options.model, engine_options)  # bad input is told before jax takes its second to import
    prompt = _stdin() if options.prompt == "-" else options.prompt

    from jengine import LLM

    llm = LLM(options.model, progress=not options.quiet, **engine_options)
    outputs = llm.stream(prompt, params)  # refuses bad input here, before anything is written
    if options.echo:
        _write(prompt)
    seen, tokens = 0, 0
    times: list[float] = []
    for out in outputs:
        times.append(time.monotonic())
        completion = out.outputs[0]
        _write(completion.text[seen:])
        seen, tokens = len(completion.text), len(completion.token_ids)
    _write("\n")
    if not (options.no_stats or options.quiet):
        _print_stats(llm.stats, tokens, times)


def _stdin() -> str:
    """All of it; bytes that are no UTF-8 become surrogates, as in arguments, and the tokenizer refuses those."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_stats(stats: dict[str, Any], tokens: int, times: list[float]) -> None:
    """One dim line: `times` are the monotonic seconds at which tokens came."""
    parts = [f"{tokens} tokens"]
    if len(times) > 1:
        parts.append(f"{(tokens - 1) / (times[-1] - times[0]):.1f} tokens/s")
    parts.append(f"first token {times[0] - _process_start():.2f} s after process start")
    parts.append(f"programs: {stats['programs_compiled']} compiled, {stats['programs_loaded']} loaded")
    line = ", ".join(parts)
    print(f"\033[2m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr)


def _process_start() -> float:
    """When this process started, on the clock of time.monotonic: so that loading Python itself counts."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of the line: start, in ticks after boot
    except (OSError, ValueError, IndexError):
        return _LOADED
    return time.monotonic() - age


# --- flags from dataclasses -----------------------------------------------------------------------


def add_fields(group: argparse._ArgumentGroup, of: type, skip: tuple[str, ...] = (), defaults: dict[str, Any] | None = None) -> None:
    """A --kebab-case flag for each field of a dataclass, with help from its docstring's Args."""
    hints, helps = get_type_hints(of), _field_helps(of)
    for field in dataclasses.fields(of):
        if field.name in skip:
            continue
        text = helps[field.name]
        default = (defaults or {}).get(field.name, field.default)
        if default not in (None, ()):
            text += f" (default: {default})"
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,  # only what was given is passed on
            help=text.replace("%", "%%"),
            **_flag(hints[field.name]),
        )


def given_fields(options: argparse.Namespace, of: type, skip: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass that were given as flags."""
    names = {field.name for field in dataclasses.fields(of)}.difference(skip)
    return {name: value for name, value in vars(options).items() if name in names}


def _flag(hint: Any) -> dict[str, Any]:
    """argparse's options for a value of this type. Of a union it takes the most general: a list, text, then numbers."""
    kinds = [kind for kind in (get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)) if kind is not type(None)]
    listed = [get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)]
    if listed:
        return {"action": "append", "type": listed[0], "metavar": "VALUE"}
    if get_origin(kinds[0]) is Literal:
        return {"choices": get_args(kinds[0])}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(kind for kind in (str, float, int) if kind in kinds)
    return {"type": kind, "metavar": {str: "TEXT", float: "NUMBER", int: "N"}[kind]}


def _field_helps(of: type) -> dict[str, str]:
    """The Args section of a docstring: name to text, on one line."""
    section = re.search(r"\n    Args:\n(.*?)(?:\n\n|\Z)", of.__doc__ or "", re.DOTALL)
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12,}.*)*)", section[1] if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


if __name__ == "__main__":
    sys.exit(main())
