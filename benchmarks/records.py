"""The cost of recording steps, and of metrics based on the records: on and off, in alternating pairs.

    python -m benchmarks.records [--pairs 10] [--steps 200] [--quick]

steps       microseconds a step of the loop with programs that do nothing, 256 decoding sequences, one core;
            see host_cost.py
throughput  tokens a second of the demo model, 32 requests at once, all cores
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.host_cost import PROMPT, TOTALLED, make_engine
from benchmarks.machine import save
from jengine import LLM, SamplingParams
from jengine.core.request import Request
from jengine.engine.loop.engine import Engine
from jengine.insight.recording.pauses import garbage_pauses
from jengine.insight.recording.step_recorder import StepRecorder

GOAL = 20.0  # microseconds a step


class NoRecords:
    """Replaces a StepRecorder: records nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._nothing

    def _nothing(self, *_: object, **__: object) -> None:
        pass


class Switch:
    """Switches recording on or off."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._records = engine, engine.records

    def turn(self, on: bool) -> None:
        self._engine._read_all_but(0)  # a step dispatched without a record has none when it is read
        pauses: Any = garbage_pauses()
        self._engine.records = self._records if on else NoRecords()  # type: ignore[assignment]
        if not on:
            gc.callbacks.remove(pauses)


def steps_cost(sequences: int, steps: int, pairs: int) -> dict[str, Any]:
    """Mean microseconds of a step, in alternating blocks of steps."""
    rng, output = np.random.default_rng(0), 4 * sequences + (2 * pairs + 2) * steps
    engine = make_engine(sequences, PROMPT[1] + output)
    for i in range(sequences):
        prompt = rng.integers(2, engine.model.vocab_size, rng.integers(PROMPT[0], PROMPT[1] + 1)).tolist()
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=output, ignore_eos=True),
            )
        )
    while len(engine.step()) < sequences:
        pass
    print(f"the calls alone: {(alone := calls_alone(engine)):.1f} us a step")
    switch = Switch(engine)

    def block(on: bool) -> float:
        switch.turn(on)
        start = time.perf_counter()
        for step in range(steps):
            engine.step()
            engine.passed_on()
            if step % TOTALLED == 0:
                engine.totals()
        return 1e6 * (time.perf_counter() - start) / steps

    return {"calls_alone": round(alone, 2), **compared(block, pairs, "us a step")}


def calls_alone(engine: Engine) -> float:
    """Microseconds of all calls that record a step, and its share of totals; the minimum of several rounds,
    the most stable figure.
    """
    records, (_, _, step) = StepRecorder(engine.scheduler, overlap=True), engine._in_flight[0]
    number = 2 * TOTALLED

    def call() -> None:
        now = time.perf_counter()
        records.turn(now)
        records.planned()
        record = records.dispatched(step.plan, now, now, now)
        records.read(record, now, now, now, waited=True, device=1e-3)
        records.turned(now)
        records.passed_on(now)

    def whole() -> None:
        for _ in range(number):
            call()
        for _ in range(number // TOTALLED):
            records.totals()

    return 1e6 * min(timeit.repeat(whole, number=1, repeat=200)) / number


def throughput(pairs: int, quick: bool) -> dict[str, Any]:
    """Tokens a second."""
    prompts = [[100 + i] * 32 for i in range(32)]
    params = SamplingParams(temperature=0.0, max_tokens=16 if quick else 64, ignore_eos=True)
    rounds = 1 if quick else 6  # of a block, so that other load affects it less
    with LLM("demo", dtype="float32", max_model_len=512, warm_up="all", progress=False) as llm:
        switch = Switch(llm.engine)

        def block(on: bool) -> float:
            switch.turn(on)
            seconds = 0.0
            for _ in range(rounds):
                llm.reset_prefix_cache()
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds += time.perf_counter() - start
            return rounds * len(prompts) * params.max_tokens / seconds  # type: ignore[operator]

        return compared(block, pairs, "tokens/s")


def compared(block: Callable[[bool], float], pairs: int, unit: str) -> dict[str, Any]:
    """Medians of alternating blocks, and the differences of pairs."""
    block(True), block(False)  # the first ones are slower
    on, off = [], []
    for pair in range(pairs):
        for state in (True, False) if pair % 2 else (False, True):
            (on if state else off).append(block(state))
    gaps = [a - b for a, b in zip(on, off, strict=True)]
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    print(
        f"{unit}: {statistics.median(on):.1f} on, {statistics.median(off):.1f} off; difference"
        f" {statistics.median(gaps):.1f} ({min(gaps):.1f} to {max(gaps):.1f}); ratio"
        f" {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})",
        flush=True,
    )
    return {
        "on": [round(x, 2) for x in on],
        "off": [round(x, 2) for x in off],
        "median_difference": round(statistics.median(gaps), 2),
        "median_ratio": round(statistics.median(ratios), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200, help="of a block")
    parser.add_argument("--part", choices=("steps", "throughput"), help="one alone, nothing saved")
    parser.add_argument("--quick", action="store_true", help="a few seconds, nothing saved")
    options = parser.parse_args()
    pairs, steps = (3, 50) if options.quick else (options.pairs, options.steps)
    results: dict[str, Any] = {"sequences": 256, "goal": GOAL}
    if options.part != "steps":
        results["throughput"] = throughput(pairs, options.quick)
    if options.part != "throughput":
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        results["steps"] = steps_cost(256, steps, pairs)
        print(f"the goal is {GOAL:.0f} us a step")
    if not options.quick and options.part is None:
        save("records", results)


if __name__ == "__main__":
    main()
