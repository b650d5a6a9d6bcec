"""`jengine generate MODEL --input FILE --output FILE`: many requests with one answer per line; resumable."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jengine import InvalidArgument, SamplingParams
from jengine.base.display import counted
from jengine.base.progress import progress_bar
from jengine.commands.batch_lines import (
    STDOUT,
    Format,
    Line,
    Output,
    OutputFile,
    Record,
    number_of_lines,
    numbered,
    own_format,
    read_again,
    unique,
)
from jengine.commands.batch_openai import is_batch_line, openai_format
from jengine.commands.flags import engine_fields, sampling_fields
from jengine.vllm.flags import flag_values

WINDOW = 4096  # number of requests sorted at a time
WINDOW_CHARACTERS = 2**26  # maximum total length of their prompts
SHARED = 256  # minimum characters of a common prefix that matters: a few pages
COMPARED = 2**14  # characters of a prompt used for sorting
CHARACTERS = 4  # approximate characters in a token
FORMATS = ("auto", "jsonl", "openai")
TABLES = (".parquet", ".csv")
FORMAT = """\
--input has one of these forms; --output has the same one:

  jsonl: a line is a JSON object:
    {"prompt": TEXT} or {"prompt_token_ids": [...]} or {"messages": [{"role": "user", "content": TEXT}, ...]},
    with an optional "id" (or "custom_id") and any sampling parameters, such as "max_tokens". Its answer is a
    line too, in order of completion:
    {"line": N, "id": ID, "prompt_tokens": N, "outputs": [{"text": TEXT, "token_ids": [...], "finish_reason":
    ...}]} or, for a line that cannot be answered, {"line": N, "id": ID, "error": REASON}.
  openai: OpenAI's batch files, with the endpoints of `jengine serve`; answers are in order of
    completion:
    {"custom_id": ID, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}

Requests are not answered in the file's order: out of a few thousand, those with a common prefix run together,
long ones first. After an interruption, run the command again with the same files: lines that have an answer
are skipped. A line is identified by its id or, if it has none, by its number. The exit code is 1 if any line
has failed; --retry-errors answers these lines again.
"""


def ordered(lines: Iterable[Line]) -> Iterator[Line]:
    """All lines, window by window. Memory is bounded by the window."""
    window: list[tuple[str, int, Line]] = []
    characters = 0
    for line in lines:
        text = _text(line)
        window.append((text[:COMPARED], _cost(line, text), line))
        characters += len(text)
        if len(window) >= WINDOW or characters >= WINDOW_CHARACTERS:
            yield from _in_order(window)
            window, characters = [], 0
    yield from _in_order(window)


def _in_order(window: list[tuple[str, int, Line]]) -> Iterator[Line]:
    """Prompts with a common beginning follow each other, so that its pages are computed once and are still
    there for the next. Longest first, since a long one that begins last is waited for alone.
    """
    window.sort(key=lambda entry: entry[0])
    groups = [list(group) for _, group in itertools.groupby(window, key=_beginning)]
    groups.sort(key=lambda group: max(cost for _, cost, _ in group), reverse=True)
    return (line for group in groups for _, _, line in group)


def _beginning(entry: tuple[str, int, Line]) -> tuple[str, int]:
    """The key of a group: a long prefix, or the request itself."""
    text, _, line = entry
    return (text[:SHARED], 0) if len(text) >= SHARED else (text, line.number)


def _text(line: Line) -> str:
    """The beginning of a prompt; of a conversation, a text that begins as others if it does."""
    if line.error is not None:
        return ""
    if isinstance(line.prompt, str):
        return line.prompt
    if not isinstance(line.prompt, dict):
        return json.dumps([line.chat.get("tools"), line.prompt])
    body = line.prompt
    prompt = body.get("prompt", body.get("input"))
    return (
        prompt if isinstance(prompt, str) else json.dumps([body.get("tools"), body.get("messages", prompt)])
    )


def _cost(line: Line, text: str) -> int:
    """Approximate number of characters to read and to generate."""
    if isinstance(line.prompt, dict):
        max_tokens = line.prompt.get("max_completion_tokens") or line.prompt.get("max_tokens")
    else:
        max_tokens = None if line.params is None else line.params.max_tokens
    return len(text) + CHARACTERS * (max_tokens if isinstance(max_tokens, int) else 0)


if TYPE_CHECKING:
    from jengine import AsyncLLM


class _Tally:
    """Counts of finished lines, and the progress bar."""

    def __init__(self, form: Format, total: int | None, before: int, quiet: bool) -> None:
        self._form = form
        self.start, self.answered, self.failed, self.tokens = time.monotonic(), 0, 0, 0
        self.bar = progress_bar(
            total=total, initial=before, desc="answering", unit="line", show=not quiet, mininterval=0.5
        )

    def count(self, line: Line, record: Record) -> None:
        if (error := self._form.error(record)) is not None:
            self.failed += 1
            self.bar.write(f"jengine: line {line.number}: {error}", file=sys.stderr)
        else:
            self.answered += 1
            self.tokens += self._form.tokens(record)
        self.bar.set_postfix_str(f"{self.rate:.0f} tokens/s", refresh=False)
        self.bar.update()

    @property
    def rate(self) -> float:
        return self.tokens / max(time.monotonic() - self.start, 1e-9)


def run(options: argparse.Namespace) -> int:
    """Answers every line of options.input without an answer in options.output. Returns 1 if any line has
    failed, now or earlier."""
    engine_options = engine_fields(options)
    there = os.path.exists(options.input) and os.path.exists(options.output)  # False for names that cannot be
    if there and options.input.samefile(options.output):
        raise InvalidArgument("output", str(options.output), "must be another file than --input")
    if options.retry_errors and options.output == STDOUT:
        raise InvalidArgument("retry_errors", True, "needs --output FILE, which holds the errors")
    raw, form = _input(options)
    total = number_of_lines(options.input)
    with Output() if options.output == STDOUT else OutputFile(options.output, form) as answers:
        if options.retry_errors:
            answers.forget_errors()
        all_lines = unique((form.read(*line) for line in raw), form.id)
        open_lines = (line for line in all_lines if line.key not in answers.done)
        first = next(open_lines, None)
        if first is None:
            failed = ""
            if answers.failed:
                failed = f", {answers.failed} of them with an error: --retry-errors answers these again"
            _report(options, f"nothing to do: {counted(len(answers.done), 'line')} answered before{failed}")
            return 1 if answers.failed else 0
        from jengine import AsyncLLM

        llm = AsyncLLM(options.model, progress=not options.quiet, **engine_options)
        lines = itertools.chain([first], open_lines)
        tally = _Tally(form, total, len(answers.done), options.quiet)
        asyncio.run(
            _answer_all(llm, form, ordered(lines) if read_again(options.input) else lines, answers, tally)
        )
        tally.bar.close()
        if total is None:
            total = len(answers.done) + tally.answered + tally.failed
        failed = f", {tally.failed} failed" if tally.failed else ""
        _report(
            options,
            f"{tally.answered} of {counted(total, 'line')} answered{failed}; {tally.tokens} tokens,"
            f" {tally.rate:.0f} tokens/s",
        )
        return 1 if answers.failed or tally.failed else 0


def _input(options: argparse.Namespace) -> tuple[Iterator[tuple[int, bytes]], Format]:
    """The numbered lines of the input, and the format given by --input-format or by the first line."""
    path, form = options.input, options.input_format or "auto"
    if form == "auto" and path.suffix in TABLES:
        limit = f"must be JSON lines or an OpenAI batch file: convert {path.suffix} files to JSON lines"
        raise InvalidArgument("input", str(path), limit)
    raw = numbered(path)
    first = next(raw, None)
    raw = raw if first is None else itertools.chain([first], raw)
    if form == "openai" or (form == "auto" and first is not None and is_batch_line(first[1])):
        for name, value in flag_values(options, SamplingParams).items():
            raise InvalidArgument(
                name, value, "cannot be given with an OpenAI batch file, whose lines set it in body"
            )
        return raw, openai_format(options.served_model_name or options.model)
    if options.served_model_name is not None:
        limit = "needs --input of the format openai"
        raise InvalidArgument("served_model_name", options.served_model_name, limit)
    return raw, own_format(sampling_fields(options))


async def _answer_all(
    llm: AsyncLLM, form: Format, lines: Iterator[Line], answers: Output, tally: _Tally
) -> None:
    """Answers a bounded number of lines at a time: twice the number of running requests, so that there is
    always one waiting."""
    places = asyncio.Semaphore(2 * llm.backend.limits.max_num_seqs)

    async def work(line: Line) -> None:
        record = await answer(line)
        answers.write([record])
        tally.count(line, record)
        places.release()

    try:
        async with llm:
            with form.answering(llm) as answer:
                async with asyncio.TaskGroup() as tasks:
                    await places.acquire()
                    # in a thread: the next line may come only after an answer to this one
                    while (line := await asyncio.to_thread(next, lines, None)) is not None:
                        tasks.create_task(work(line))
                        await places.acquire()
    except ExceptionGroup as failures:  # the engine's, which all tasks report, or the output's
        raise failures.exceptions[0] from None


def _report(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(text, file=sys.stderr)
