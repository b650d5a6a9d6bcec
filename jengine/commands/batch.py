"""`jengine generate MODEL --input FILE --output FILE`: many requests, one answer a line, resumed where it stopped."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jengine import InvalidArgument, ModelError, RequestOutput
from jengine.commands.batch_files import STDOUT, Answers, Line, Output, Stdout, count_lines, read_lines
from jengine.commands.flags import engine_fields, sampling_fields
from jengine.display import counted
from jengine.observe.progress import progress_bar

if TYPE_CHECKING:
    from jengine import AsyncLLM

FORMAT = """\
a line of --input is a JSON object:
  {"prompt": TEXT} or {"prompt_token_ids": [...]} or {"messages": [{"role": "user", "content": TEXT}, ...]},
  with "id" (or "custom_id"), if wanted, and any sampling parameter by its name, such as "max_tokens".
a line of --output is its answer; order is that of completion:
  {"line": N, "id": ID, "prompt_tokens": N, "outputs": [{"text": TEXT, "token_ids": [...], "finish_reason": ...}]}
  or, for a line that cannot be answered, {"line": N, "id": ID, "error": REASON}.
Run again with the same files after an interruption: lines that have an answer are skipped. A line is identified by its
id, else by its number. The exit code is 1 if any line has failed; --retry-errors answers these lines again.
"""


class _Tally:
    """What has been done so far, and its progress bar."""

    def __init__(self, total: int | None, before: int, quiet: bool) -> None:
        self.start, self.answered, self.failed, self.tokens = time.monotonic(), 0, 0, 0
        self.bar = progress_bar(total=total, initial=before, desc="answering", unit="line", show=not quiet, mininterval=0.5)

    def count(self, line: Line, record: dict[str, Any]) -> None:
        if "error" in record:
            self.failed += 1
            self.bar.write(f"jengine: line {line.number}: {record['error']}", file=sys.stderr)
        else:
            self.answered += 1
            self.tokens += sum(len(output["token_ids"]) for output in record["outputs"])
        self.bar.set_postfix_str(f"{self.rate:.0f} tokens/s", refresh=False)
        self.bar.update()

    @property
    def rate(self) -> float:
        return self.tokens / max(time.monotonic() - self.start, 1e-9)


def run(options: argparse.Namespace) -> int:
    """Answer every line of options.input that options.output has no answer to. Returns 1 if a line failed, now or before; else 0."""
    defaults, engine_options = sampling_fields(options), engine_fields(options)
    if options.input.exists() and options.output.exists() and options.input.samefile(options.output):
        raise InvalidArgument("output", str(options.output), "must be another file than --input")
    if options.retry_errors and options.output == STDOUT:
        raise InvalidArgument("retry_errors", True, "needs --output FILE, which holds the errors")
    total = count_lines(options.input)
    with _output(options) as answers:
        open_lines = (line for line in read_lines(options.input, defaults) if line.key not in answers.done)
        first = next(open_lines, None)
        if first is None:
            failed = f", {answers.failed} of them with an error: --retry-errors answers these again" if answers.failed else ""
            _say(options, f"nothing to do: {counted(len(answers.done), 'line')} answered before{failed}")
            return 1 if answers.failed else 0
        from jengine import AsyncLLM

        llm = AsyncLLM(options.model, progress=not options.quiet, **engine_options)
        tally = _Tally(total, len(answers.done), options.quiet)
        asyncio.run(_answer_all(llm, itertools.chain([first], open_lines), answers, tally))
        tally.bar.close()
        if total is None:
            total = len(answers.done) + tally.answered + tally.failed
        failed = f", {tally.failed} failed" if tally.failed else ""
        _say(options, f"{tally.answered} of {counted(total, 'line')} answered{failed}; {tally.tokens} tokens, {tally.rate:.0f} tokens/s")
        return 1 if answers.failed or tally.failed else 0


def _output(options: argparse.Namespace) -> Output:
    return Stdout() if options.output == STDOUT else Answers(options.output, retry_errors=options.retry_errors)


async def _answer_all(llm: AsyncLLM, lines: Iterable[Line], answers: Output, tally: _Tally) -> None:
    """A bounded number at a time: twice what runs at once, so that there is always one waiting."""
    most = 2 * llm.backend.limits.max_num_seqs
    tasks: dict[asyncio.Task[dict[str, Any]], Line] = {}

    async def collect(leave: int) -> None:
        while len(tasks) > leave:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finished = [(tasks.pop(task), task.result()) for task in done]
            answers.write([record for _, record in finished])
            for line, record in finished:
                tally.count(line, record)

    try:
        async with llm:
            for line in lines:
                tasks[asyncio.create_task(_answer(llm, line))] = line
                await collect(most - 1)
            await collect(0)
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)  # after a failure, which all of them report: once is enough


async def _answer(llm: AsyncLLM, line: Line) -> dict[str, Any]:
    if line.error is not None:
        return line.record(error=line.error)
    try:
        if line.kind == "messages":
            outputs = llm.chat(line.prompt, line.params, output_kind="final", **line.chat)
        else:
            outputs = llm.generate(line.prompt, line.params, output_kind="final")
        [output] = [output async for output in outputs]
    except (InvalidArgument, ModelError) as refusal:  # ModelError: messages, and the model has no chat template
        return line.record(error=str(refusal))
    return line.record(**_shown(output))


def _shown(output: RequestOutput) -> dict[str, Any]:
    """What a record holds of an answer; log probabilities where they were asked for."""
    fields = dataclasses.asdict(output)
    for part in (fields, *fields["outputs"]):
        for name in ("prompt_logprobs", "logprobs", "cumulative_logprob"):
            if name in part and part[name] is None:
                del part[name]
    kept = {name: fields[name] for name in fields if name in ("outputs", "prompt_logprobs")}
    return {"prompt_tokens": len(output.prompt_token_ids), **kept}


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.quiet:
        print(text, file=sys.stderr)
