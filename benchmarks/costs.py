"""Predicted and measured steps, with the spread of identical steps; and the recovery after a period of other
load.

    python -m benchmarks.costs [--models demo 134m] [--seconds 30] [--slow 60] [--quick]

The engine measures its programs, as at a first start, then serves a random load: 1 to 32 sequences at once,
prompts of all lengths, greedy, sampled and truncated. Every step whose time the host can see is predicted
before it is observed. Then steps of that load are repeated: the deviation of identical steps from their
median is a lower bound for any prediction's error. Finally, two busy processes slow the machine for a while.
The load continues, and steps are counted until the median error of 15 steps is within the goal again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import add, made_model
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.measure import measure as measure_costs
from jengine.engine.start import start_engine
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import StepPlan, Work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey

GOAL = 1.5  # multiple of the spread of identical steps
WINDOW = 15  # number of steps whose median error counts
KINDS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, ignore_eos=True, seed=1),
    SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=2),
)
LONGEST = 2048  # maximum tokens of a request
FEWEST, SECONDS = 10, 3.0  # repetitions of a step: a minimum number, and further ones for this time
BUSY = "while True: pass"


class Step(NamedTuple):
    trunk: TrunkKey
    sampler: SamplerKey
    work: Work
    predicted: float  # seconds
    measured: float

    @property
    def error(self) -> float:
        return abs(self.measured / self.predicted - 1.0)


class Watched(StepCosts):
    """Costs that record their prediction for each observed step."""

    def __init__(self, table: ProgramTable) -> None:
        super().__init__(table)
        self.steps: list[Step] = []

    def observe(self, *step: Any, **more: Any) -> None:
        trunk, sampler, work, seconds, *_ = step
        self.steps.append(Step(trunk, sampler, work, self.seconds(trunk, sampler, work), seconds))
        super().observe(*step, **more)


class Load:
    """Endless requests. The number of concurrent requests changes about every second."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine, self.random, self._ids = engine, random.Random(seed), itertools.count()

    def run(self, costs: Watched, seconds: float) -> list[Step]:
        """Runs the load for this time. Returns the observed steps."""
        engine, rng, first, end = self.engine, self.random, len(costs.steps), time.monotonic() + seconds
        wanted, until = 1, 0.0
        while time.monotonic() < end:
            if time.monotonic() > until:
                wanted, until = rng.choice((1, 2, 4, 8, 16, 24, 32)), time.monotonic() + rng.uniform(0.3, 1.5)
            while engine.scheduler.registry.num_running + engine.scheduler.registry.num_waiting < wanted:
                engine.add(self._request())
            engine.step()
        return costs.steps[first:]

    def drain(self) -> None:
        for sequence in [*self.engine.scheduler.registry.by_number.values()]:
            self.engine.end(sequence.request_id, "abort")
        while self.engine.has_work:
            self.engine.step()

    def _request(self) -> Request:
        rng, most = self.random, min(self.engine.scheduler.limits.max_model_len, LONGEST)
        prompt = int(most ** rng.uniform(0.2, 0.9))
        params = replace(rng.choice(KINDS), max_tokens=min(int(most ** rng.uniform(0.4, 0.8)), most - prompt))
        tokens = [rng.randrange(2, self.engine.model.vocab_size) for _ in range(prompt)]
        return Request(request_id=str(next(self._ids)), prompt_token_ids=tokens, params=params)


def repeated(engine: Engine, plans: list[StepPlan], runs: int) -> list[float]:
    """Relative deviations of identical steps from their median. Each is dispatched before the previous one is
    read.
    """
    runner, deviations = engine.runner, []
    for plan in plans:
        before, times, end = runner.dispatch(plan), [], time.monotonic() + SECONDS
        while len(times) <= FEWEST or (len(times) <= runs and time.monotonic() < end):
            following = runner.dispatch(plan)
            result = runner.read(before)
            times.append((time.perf_counter(), result.waited))
            before = following
        runner.read(before)
        seconds = [after - earlier for (earlier, a), (after, b) in itertools.pairwise(times) if a and b]
        if len(seconds) >= FEWEST // 2:
            typical = statistics.median(seconds)
            deviations += [abs(one / typical - 1.0) for one in seconds]
    return deviations


def sample_plans(engine: Engine, load: Load, costs: Watched, count: int) -> list[StepPlan]:
    """Plans of steps that ran, without their changes, so that dispatching them again computes the same."""
    kept: list[StepPlan] = []
    dispatch = engine.runner.dispatch

    def noted(plan: StepPlan) -> Any:
        if len(kept) < wanted and load.random.random() < 0.3:
            kept.append(StepPlan(plan.trunk, plan.sampler, plan.spans, plan.samples, work=plan.work))
        return dispatch(plan)

    engine.runner.dispatch = noted  # type: ignore[method-assign]
    for wanted in range(1, count + 1):  # one from each period, since neighbours are similar
        while len(kept) < wanted:
            load.run(costs, 0.5)
    engine.runner.dispatch = dispatch  # type: ignore[method-assign]
    return kept


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Busy processes run in this context."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def percentiles(values: list[float]) -> dict[str, float]:
    return {"median": round(float(np.median(values)), 4), "p95": round(float(np.percentile(values, 95)), 4)}


def recovered(steps: list[Step], limit: float) -> int | None:
    """Number of steps until the median error of WINDOW steps is within the limit; None: never."""
    errors = [step.error for step in steps]
    ends = range(WINDOW, len(errors) + 1)
    return next((end for end in ends if statistics.median(errors[end - WINDOW : end]) <= limit), None)


def measure(name: str, seconds: float, slow: float) -> dict[str, Any]:
    model = name if name == "demo" else str(made_model(name))
    engine, _ = start_engine(EngineConfig.of(model, {"warm_up": "all", "enable_prefix_caching": False}))
    costs = Watched(engine.scheduler.table)  # as at a first start
    begun = time.perf_counter()
    measure_costs(engine.runner, engine.scheduler.predictor.ready, costs, progress=False)  # type: ignore[arg-type]
    measuring = time.perf_counter() - begun
    engine.scheduler.predictor.costs = costs
    load = Load(engine)
    first = load.run(costs, seconds / 3)
    later = load.run(costs, seconds)
    plans = sample_plans(engine, load, costs, 12)
    spread = percentiles(repeated(engine, plans, 40))
    error = percentiles([step.error for step in later])
    limit = GOAL * spread["median"]
    with busy(2):
        during = load.run(costs, slow)
    after = load.run(costs, seconds / 2)
    load.drain()
    result = {
        "measuring_seconds": round(measuring, 2),
        "spread": spread,
        "first": percentiles([step.error for step in first]),
        "later": error,
        "by_tiles": {
            kind: percentiles([step.error for step in later if bool(step.trunk.tiles) == tiles])
            for kind, tiles in (("decode", False), ("prefill", True))
        },
        "ratio": {name: round(error[name] / spread[name], 2) for name in error},
        "steps": {"observed": len(later), "programs": len({(step.trunk, step.sampler) for step in later})},
        "slowed": {
            "seconds": slow,
            "times_as_long": round(_times(during, costs) / _times(later, costs), 2),
            "steps": len(during),
            "error": percentiles([step.error for step in during]),
            "recovered_after": recovered(after, limit),
            "error_after": percentiles([step.error for step in after[2 * WINDOW :]]),
        },
    }
    print(f"\n{name}: all programs measured in {measuring:.1f} s")
    print(f"{'':34}{'median':>8}{'p95':>8}")
    lines = (
        ("spread of identical steps", spread),
        ("error after warm-up", result["first"]),
        ("error later", error),
    )
    for label, values in (*lines, *((f"  {kind}", values) for kind, values in result["by_tiles"].items())):
        print(f"{label:34}{values['median']:8.1%}{values['p95']:8.1%}")
    slowed_down = result["slowed"]
    print(f"times the spread: {result['ratio']['median']} and {result['ratio']['p95']}; the goal is {GOAL}")
    print(
        f"slowed {slowed_down['times_as_long']} times for {slow:.0f} s: error"
        f" {slowed_down['error']['median']:.1%};"
    )
    print(
        f"back within the goal after {slowed_down['recovered_after']} steps, error then"
        f" {slowed_down['error_after']['median']:.1%}"
    )
    print("most frequent:", Counter(str(step.trunk) for step in later).most_common(6))
    return result


def _times(steps: list[Step], costs: StepCosts) -> float:
    """Duration of steps relative to their usual duration."""
    return statistics.median(
        step.measured / costs.seconds(step.trunk, step.sampler, step.work) for step in steps
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "134m"])
    parser.add_argument("--seconds", type=float, default=30, help="of the load that is predicted")
    parser.add_argument("--slow", type=float, default=60, help="seconds of others' work")
    parser.add_argument("--quick", action="store_true", help="demo only, 3 s each, nothing saved")
    options = parser.parse_args()
    models, seconds, slow = (
        (["demo"], 3.0, 3.0) if options.quick else (options.models, options.seconds, options.slow)
    )
    results = {name: measure(name, seconds, slow) for name in models}
    if not options.quick:
        add("costs", "models", {name: {**result, "goal": GOAL} for name, result in results.items()})


if __name__ == "__main__":
    main()
