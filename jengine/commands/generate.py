"""`jengine generate`: completes a prompt on the terminal, or with --input a file (see batch.py)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jengine import InvalidArgument, JengineError, RequestOutput, SamplingParams
from jengine.commands import batch
from jengine.commands.batch_lines import STDOUT
from jengine.commands.flags import (
    COMMON_ENGINE,
    COMMON_SAMPLING,
    add_flags,
    add_lora,
    add_model,
    add_sampling_and_engine,
    engine_fields,
    follows,
    lora_request,
    refuse,
    sampling_fields,
)
from jengine.commands.terminal import note, write
from jengine.vllm.flags import add_help

_LOADED = time.monotonic()  # replaces the process's start time if /proc is missing


def add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete a prompt, streamed to the terminal, or a file of prompts",
        description="Complete a prompt and stream the text to stdout; progress and statistics go to stderr.\n"
        "With --input, complete a file of prompts instead.",
        epilog=batch.FORMAT,
        add_help=False,
    )
    add_help(parser, ("n", *COMMON_SAMPLING, *COMMON_ENGINE, "input", "output"))
    add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; - reads it from stdin")
    add_lora(parser)
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    parser.add_argument("--no-stats", action="store_true", help="no closing line of statistics")
    parser.add_argument("--quiet", action="store_true", help="no statistics and no progress bars")
    files = parser.add_argument_group("a file of prompts")
    answers = "answers, appended as they finish; lines with an answer are skipped (default: stdout)"
    name = "model name in the bodies of an OpenAI batch file (default: MODEL)"
    add_flags(
        files,
        ("--input", "FILE", "requests: JSON lines or an OpenAI batch file; - reads stdin"),
        ("--output", "FILE", answers),
        ("--input-format", batch.FORMATS, "see below; auto uses the file's first line (default: auto)"),
        ("--served-model-name", "NAME", name),
    )
    files.add_argument(
        "--retry-errors", action="store_true", help="answer lines again that failed in earlier runs"
    )
    add_sampling_and_engine(parser)
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    if follows(options):
        return 0
    if (options.prompt is None) == (options.input is None):
        raise JengineError("give either a PROMPT (- reads it from stdin) or --input FILE")
    if options.input is not None:
        if options.lora is not None:
            raise InvalidArgument("lora", options.lora, "cannot be given with --input FILE")
        options.output = options.output or STDOUT
        return batch.run(options)
    refuse(options, ("output", "input_format", "served_model_name", "retry_errors"), "needs --input FILE")
    _generate_one(options)
    return 0


def _generate_one(options: argparse.Namespace) -> None:
    params = SamplingParams(**sampling_fields(options))
    engine_options = engine_fields(options)
    prompt = _stdin() if options.prompt == "-" else options.prompt

    from jengine import LLM

    lora = lora_request(options, engine_options)
    llm = LLM(options.model, progress=not options.quiet, **engine_options)
    # rejects bad input before anything is written
    outputs = llm.stream(prompt, params, lora_request=lora)
    tokens, times = _show(outputs, params.n, prompt if options.echo else "")
    if not (options.no_stats or options.quiet):
        _print_stats(llm.stats, tokens, times)


def _show(outputs: Iterable[RequestOutput], n: int, echo: str) -> tuple[int, list[float]]:
    """Prints completions one below the other, streaming the first unfinished one.

    Returns the number of tokens in all completions, and the times (time.monotonic()) at which they grew.

    Raises:
        JengineError: a completion has failed.
    """
    tokens, times = 0, []
    index, seen = 0, 0  # of the completion being printed: its index, and its number of printed characters
    write(_head(index, n) + echo)
    for out in outputs:
        times.append(time.monotonic())
        tokens = sum(len(completion.token_ids) for completion in out.outputs)
        for completion in out.outputs[index:]:
            if completion.index > index:
                index, seen = completion.index, 0
                write("\n" + _head(index, n) + echo)
            write(completion.text[seen:])
            seen = len(completion.text)
            if completion.finish_reason is None:
                break
    write("\n")
    out.require_answer()
    return tokens, times


def _head(index: int, n: int) -> str:
    return f"--- {index + 1} of {n} ---\n" if n > 1 else ""


def _stdin() -> str:
    """Reads all of stdin. Invalid UTF-8 becomes surrogates, as in arguments, which the tokenizer rejects."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def _print_stats(stats: dict[str, Any], tokens: int, times: list[float]) -> None:
    """Prints a dim line of statistics."""
    parts = [f"{tokens} tokens"]
    if len(times) > 1:
        parts.append(f"{(tokens - 1) / (times[-1] - times[0]):.1f} tokens/s")
    parts.append(f"first token {times[0] - _process_start():.2f} s after process start")
    compiled, seconds = stats["programs_compiled"], stats["start_seconds"]["programs"]
    parts.append(f"programs: {compiled} compiled, {stats['programs_loaded']} loaded in {seconds:.1f} s")
    if stats["programs_ready"] < stats["programs"]:
        parts[-1] += f", {stats['programs_ready']} of {stats['programs']} ready by now"
    note(", ".join(parts))
    if compiled:
        note("The compiled programs are saved: the next start loads them.")


def _process_start() -> float:
    """Start of this process on the clock of time.monotonic(), so that loading Python is included."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        # field 22 of the line: start time in ticks after boot
        age = uptime - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return _LOADED
    return time.monotonic() - age
