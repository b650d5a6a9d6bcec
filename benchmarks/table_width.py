"""The cost of a wider block table for a decode step: the same cache and weights, max_model_len doubled; steps
interleaved.

python -m benchmarks.table_width [--models demo 134m] [--steps 200] [--quick]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import made_model, save
from jengine.checkpoints import load, read_config, resolve
from jengine.execution.device_state import ALLOCATE
from jengine.execution.kinds import Key
from jengine.execution.programs import lower
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.execution.worker import Worker
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.step_plan import Sample, Span, StepPlan
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey

ROWS, CONTEXT, PAGE_SIZE = 32, 256, 16
GOAL = 0.05  # maximum share of a step's time


class StepPrograms(dict[Key, Any]):
    """The programs of one decode step."""

    def __init__(self, spec: ExecutionSpec) -> None:
        keys: list[Key] = [ALLOCATE, TrunkKey(ROWS, 0), SamplerKey(ROWS, "greedy")]
        super().__init__((key, lower(spec, key).compile()) for key in keys)


def make_runner(folder: Path, max_model_len: int, params: Params | None) -> Runner:
    """A runner for `ROWS` sequences whose tables hold CONTEXT tokens. The number of pages does not depend on
    max_model_len."""
    mesh, pages = make_mesh(1), CONTEXT // PAGE_SIZE
    model = build(replace(read_config(folder), max_position=max_model_len), "float32", max_model_len)
    spec = ExecutionSpec(
        model=model,
        mesh=mesh,
        table=ProgramTable((ROWS,), (ROWS,), (1,), 64),
        max_model_len=max_model_len,
        max_slots=ROWS,
        page_size=PAGE_SIZE,
        num_pages=1 + ROWS * pages,
    )
    params = load(folder, model, mesh, progress=False) if params is None else params
    runner = Runner(Worker(spec, StepPrograms(spec), params))  # type: ignore[arg-type]
    for index in range(pages):
        entries = [(0, slot, index, 1 + (slot - 1) * pages + index) for slot in range(1, ROWS + 1)]
        runner.read(runner.dispatch(decode(entries)))
    return runner


def decode(entries: list[tuple[int, int, int, int]] | None = None) -> StepPlan:
    """A step in which every sequence reads its CONTEXT-th token."""
    spans = [Span(slot, slot, CONTEXT - 1, known=slot) for slot in range(1, ROWS + 1)]
    samples = [Sample(i, 0, span.seq, span.slot) for i, span in enumerate(spans)]
    return StepPlan(TrunkKey(ROWS, 0), SamplerKey(ROWS, "greedy"), spans, samples, table=entries or [])


def step_seconds(runner: Runner) -> float:
    begin = time.perf_counter()
    runner.read(runner.dispatch(decode()))
    return time.perf_counter() - begin


def measure(name: str, steps: int) -> dict[str, Any]:
    folder = resolve("demo") if name == "demo" else made_model(name)
    length = read_config(folder).max_position
    single = make_runner(folder, length, None)
    double = make_runner(folder, 2 * length, single.params)
    pairs = []
    for i in range(steps + 10):
        order = (single, double) if i % 2 else (double, single)
        took = {runner.spec.max_model_len: step_seconds(runner) for runner in order}
        pairs.append((took[length], took[2 * length]))
    ms = 1e3 * np.array(pairs[10:])
    low, middle, high = np.percentile(ms, [10, 50, 90], axis=0)
    by_pair = np.percentile(ms[:, 1] / ms[:, 0] - 1, [25, 50, 75])
    # Other load only makes steps longer: the lowest tenth is affected least.
    change, change_of_p10 = float(middle[1] / middle[0] - 1), float(low[1] / low[0] - 1)
    widths = [single.spec.table_width, double.spec.table_width]
    print(
        f"\n{name}: {ROWS} rows at context {CONTEXT}, {steps} steps of each,"
        f" ms\n\n{'table width':>12}{'p10':>9}{'median':>9}{'p90':>9}"
    )
    for i, width in enumerate(widths):
        print(f"{width:12}{low[i]:9.2f}{middle[i]:9.2f}{high[i]:9.2f}")
    print(f"change: {change_of_p10:+.1%} of p10, {change:+.1%} of the median; the goal is under {GOAL:.0%}")
    print(f"change by pair, quartiles: {by_pair[0]:+.1%}, {by_pair[1]:+.1%}, {by_pair[2]:+.1%}")
    return {
        "table_width": widths,
        "steps": steps,
        "ms": {
            name: values.round(3).tolist()
            for name, values in (("p10", low), ("median", middle), ("p90", high))
        },
        "change_of_p10": round(change_of_p10, 4),
        "change_of_median": round(change, 4),
        "change_by_pair_quartiles": by_pair.round(4).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=("demo", "134m"), default=["demo", "134m"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="the demo model, 20 steps, nothing saved")
    options = parser.parse_args()
    models, steps = (["demo"], 20) if options.quick else (options.models, options.steps)
    results = {name: measure(name, steps) for name in models}
    if not options.quick:
        save("table_width", {"rows": ROWS, "context": CONTEXT, "goal": GOAL, "models": results})


if __name__ == "__main__":
    main()
