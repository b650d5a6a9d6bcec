"""Continuous against static batching: one engine, one set of programs, the same requests, greedy.

python -m benchmarks.batching [--requests 128] [--rounds 1] [--quick]

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
from jengine.engine import Engine
from jengine.execution.runner import InFlight, Runner, StepResult
from jengine.program_table import ProgramTable
from jengine.request import Request, SamplingParams
from jengine.scheduling.step_plan import StepPlan
from jengine.start import start

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


class RecordingRunner:
    """A runner that notes each step. A step's time is from when the device could start it until its tokens were there."""

    def __init__(self, inner: Runner, table: ProgramTable) -> None:
        self.record = Record()
        self._inner, self._table = inner, table
        self._dispatched: dict[int, float] = {}
        self._last_read = 0.0

    def dispatch(self, plan: StepPlan) -> InFlight:
        record = self.record
        record.rows.append(len(plan.row_slots))
        record.real.append(len(plan.row_slots) + sum(len(tile.token_ids) for tile in plan.tiles))
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


def measure(engine: Engine, runner: RecordingRunner, arm: str, work: list[Work]) -> dict[str, Any]:
    """Runs one arm and prints it: output tokens per second, padding, occupancy, and where the time went."""
    runner.record = record = Record()
    before = time.perf_counter()
    ARMS[arm](engine, work)
    seconds = time.perf_counter() - before
    by_program: dict[str, list[float]] = defaultdict(list)
    for program, took in zip(record.programs, record.seconds, strict=True):
        by_program[program].append(took)
    programs = {
        name: {"steps": len(took), "mean_ms": round(1e3 * statistics.mean(took), 1), "share": round(sum(took) / seconds, 3)}
        for name, took in sorted(by_program.items(), key=lambda item: -sum(item[1]))
    }
    tokens = sum(item.output for item in work)
    result = {
        "output_tokens": tokens,
        "seconds": round(seconds, 2),
        "output_tokens_per_second": round(tokens / seconds, 1),
        "padding_share": round(1 - sum(record.real) / sum(record.axis), 3),
        "mean_decode_rows": round(statistics.mean(rows for rows in record.rows if rows), 1),
        "steps": len(record.rows),
    }
    print(
        f"\n{arm}: {result['output_tokens_per_second']} output tokens/s, {tokens} in {seconds:.1f} s; {len(record.rows)} steps, "
        f"{result['mean_decode_rows']} of {MAX_NUM_SEQS} rows decoding, {result['padding_share']:.1%} of the token axis is padding"
    )
    for name, facts in programs.items():
        print(f"    {name:40}{facts['steps']:6} steps{facts['mean_ms']:9.1f} ms each{facts['share']:8.1%} of the time")
    return {**result, "programs": programs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="each runs all arms; the medians count")
    parser.add_argument("--model", help="another model than the 134M shape, which is made when it is missing")
    parser.add_argument("--dtype", default="auto", help="of weights, activations and cache")
    parser.add_argument("--quick", action="store_true", help="the demo model, nothing saved")
    options = parser.parse_args()
    model = options.model or ("demo" if options.quick else str(made_model("134m")))
    config = EngineConfig.of(model, {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": PROMPT[1] + OUTPUT[1], "dtype": options.dtype})
    engine, _ = start(config)
    inner = engine.runner
    assert isinstance(inner, Runner)
    engine.runner = runner = RecordingRunner(inner, engine.scheduler.table)
    work = make_work(options.requests, engine.model.vocab_size)
    drain(engine, work[:4])  # the first steps of a process are slower
    rounds = [{arm: measure(engine, runner, arm, work) for arm in ARMS} for _ in range(options.rounds)]

    rates = {arm: statistics.median(r[arm]["output_tokens_per_second"] for r in rounds) for arm in ARMS}
    ratios = {arm: round(rates["continuous"] / rates[arm], 2) for arm in ("static", "padded")}
    print(f"\ncontinuous / static: {ratios['static']}; continuous / padded: {ratios['padded']}; the goal is {GOAL}")
    if not options.quick:
        facts = {
            "model": options.model or "134m",
            "dtype": str(inner.spec.model.dtype),
            "requests": options.requests,
            "max_num_seqs": MAX_NUM_SEQS,
        }
        save("batching", {**facts, "ratio": ratios, "goal": GOAL, "rounds": rounds})


if __name__ == "__main__":
    main()
