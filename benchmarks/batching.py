"""Continuous against static batching: one engine, one set of programs, the same requests, greedy.

python -m benchmarks.batching [--requests 128] [--quick]

continuous  a request is admitted as soon as another has ended
static      32 are admitted, and the next 32 when all of these have ended; ended rows leave the batch
padded      static as it is usually meant: the batch keeps its shape, so every row runs on until the longest
            has ended, and only the tokens that were asked for count
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.machine import made_model, save
from jengine.config import EngineConfig
from jengine.engine.engine import Engine
from jengine.engine.start import start_engine
from jengine.execution.runner import InFlight, Runner, StepResult
from jengine.request import Request, SamplingParams
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable

MAX_NUM_SEQS = 32
PROMPT, OUTPUT = (16, 512), (16, 256)  # tokens, drawn evenly
GOAL = 1.5  # continuous / static


@dataclass(slots=True)
class Work:
    prompt: list[int]
    output: int  # tokens wanted
    generated: int  # tokens asked of the engine


@dataclass(slots=True)
class Record:
    """What the steps of one run held, and what each took."""

    rows: list[int] = field(default_factory=list)  # decode rows
    real: list[int] = field(default_factory=list)  # tokens that are not padding
    axis: list[int] = field(default_factory=list)  # tokens with padding
    programs: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    whole: float = 0.0  # seconds of the run

    def by_program(self) -> dict[str, list[float]]:
        took: dict[str, list[float]] = defaultdict(list)
        for program, seconds in zip(self.programs, self.seconds, strict=True):
            took[program].append(seconds)
        return took


class RecordingRunner:
    """A runner that notes each step. A step's time is from when the device could start it until its tokens were there."""

    def __init__(self, inner: Runner, table: ProgramTable) -> None:
        self.record = Record()
        self._inner, self._table = inner, table
        self._dispatched: dict[int, float] = {}
        self._last_read = 0.0

    def dispatch(self, plan: StepPlan) -> InFlight:
        record = self.record
        record.rows.append(self._table.place(plan.spans).rows)
        record.real.append(sum(span.length for span in plan.spans))
        record.axis.append(self._table.tokens(plan.trunk))
        record.programs.append(f"{plan.trunk} {plan.sampler}")
        self._dispatched[id(plan)] = time.perf_counter()
        return self._inner.dispatch(plan)

    def read(self, step: InFlight) -> StepResult:
        result = self._inner.read(step)
        now = time.perf_counter()
        self.record.seconds.append(now - max(self._last_read, self._dispatched.pop(id(step.plan))))
        self._last_read = now
        return result


def make_work(count: int, vocab: int) -> list[Work]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(*PROMPT, count, endpoint=True), rng.integers(*OUTPUT, count, endpoint=True)
    return [Work(rng.integers(2, vocab, prompt).tolist(), int(output), int(output)) for prompt, output in zip(*lengths, strict=True)]


def drain(engine: Engine, work: Iterable[Work]) -> None:
    """Runs this work until all of it has ended."""
    for i, item in enumerate(work):
        params = SamplingParams(temperature=0.0, max_tokens=item.generated, ignore_eos=True)
        engine.add(Request(request_id=str(i), prompt_token_ids=item.prompt, params=params))
    while engine.has_work:
        engine.step()


def continuous(engine: Engine, work: list[Work]) -> None:
    drain(engine, work)


def static(engine: Engine, work: list[Work]) -> None:
    for group in groups(work):
        drain(engine, group)


def padded(engine: Engine, work: list[Work]) -> None:
    for group in groups(work):
        longest = max(item.output for item in group)
        drain(engine, [Work(item.prompt, item.output, longest) for item in group])


def groups(work: list[Work]) -> list[list[Work]]:
    return [work[i : i + MAX_NUM_SEQS] for i in range(0, len(work), MAX_NUM_SEQS)]


ARMS: dict[str, Callable[[Engine, list[Work]], None]] = {"continuous": continuous, "static": static, "padded": padded}


def measure(engine: Engine, runner: RecordingRunner, arm: str, work: list[Work]) -> Record:
    runner.record = record = Record()
    before = time.perf_counter()
    ARMS[arm](engine, work)
    record.whole = time.perf_counter() - before
    return record


def summary(record: Record, tokens: int) -> dict[str, Any]:
    programs = {
        name: {"steps": len(took), "mean_ms": round(1e3 * statistics.mean(took), 1), "share": round(sum(took) / record.whole, 3)}
        for name, took in sorted(record.by_program().items(), key=lambda item: -sum(item[1]))
    }
    return {
        "output_tokens": tokens,
        "seconds": round(record.whole, 2),
        "output_tokens_per_second": round(tokens / record.whole, 1),
        "padding_share": round(1 - sum(record.real) / sum(record.axis), 3),
        "mean_decode_rows": round(statistics.mean(rows for rows in record.rows if rows), 1),
        "steps": len(record.rows),
        "programs": programs,
    }


def show(arm: str, facts: dict[str, Any]) -> None:
    print(
        f"\n{arm}: {facts['output_tokens_per_second']} output tokens/s, {facts['output_tokens']} in {facts['seconds']:.1f} s; "
        f"{facts['steps']} steps, {facts['mean_decode_rows']} of {MAX_NUM_SEQS} rows decoding, {facts['padding_share']:.1%} padding"
    )
    for name, program in facts["programs"].items():
        print(f"    {name:40}{program['steps']:6} steps{program['mean_ms']:9.1f} ms each{program['share']:8.1%} of the time")


def even_seconds(records: dict[str, Record]) -> dict[str, float]:
    """Each arm's seconds if a program always took its median time over all arms.

    What others run on the machine slows now this arm, now that; here only what was run counts.
    """
    pooled: dict[str, list[float]] = defaultdict(list)
    for record in records.values():
        for program, took in record.by_program().items():
            pooled[program] += took
    medians = {program: statistics.median(took) for program, took in pooled.items()}
    return {arm: sum(medians[program] for program in record.programs) for arm, record in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--model", help="another model than the 134M shape, which is made when it is missing")
    parser.add_argument("--dtype", default="auto", help="of weights, activations and cache")
    parser.add_argument("--quick", action="store_true", help="the demo model, nothing saved")
    options = parser.parse_args()
    model = options.model or ("demo" if options.quick else str(made_model("134m")))
    config = EngineConfig.of(model, {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": PROMPT[1] + OUTPUT[1], "dtype": options.dtype})
    engine, _ = start_engine(config)
    inner = engine.runner
    assert isinstance(inner, Runner)
    engine.runner = runner = RecordingRunner(inner, engine.scheduler.table)
    work = make_work(options.requests, engine.model.vocab_size)
    drain(engine, work[:4])  # the first steps of a process are slower
    tokens = sum(item.output for item in work)
    records, arms = {}, {}
    for arm in ARMS:
        records[arm] = measure(engine, runner, arm, work)
        arms[arm] = summary(records[arm], tokens)
        show(arm, arms[arm])

    even = even_seconds(records)
    ratios = {}
    for arm in ("static", "padded"):
        ratios[arm] = {
            "measured": round(records[arm].whole / records["continuous"].whole, 2),
            "even": round(even[arm] / even["continuous"], 2),
        }
        print(f"\ncontinuous / {arm}: {ratios[arm]['measured']}; with one time for each program: {ratios[arm]['even']}", end="")
    print(f"; the goal is {GOAL}")
    if not options.quick:
        facts = {"model": options.model or "134m", "dtype": str(inner.spec.model.dtype), "max_num_seqs": MAX_NUM_SEQS}
        save("batching", {**facts, "requests": options.requests, "ratios": ratios, "goal": GOAL, "arms": arms})


if __name__ == "__main__":
    main()
