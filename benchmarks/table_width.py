"""What a wider block table costs a decode step: the same cache and weights, max_model_len doubled; steps interleaved.

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
from jengine.execution.programs import ALLOCATE, Key, lower
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.models import Params, build
from jengine.parallel.mesh import make_mesh
from jengine.program_table import ProgramTable, SamplerKey, TrunkKey
from jengine.scheduling.step_plan import StepPlan

ROWS, CONTEXT, PAGE_SIZE = 32, 256, 16
GOAL = 0.05  # share of a step's time


class StepPrograms(dict[Key, Any]):
    """The programs of one decode step."""

    def __init__(self, spec: ExecutionSpec) -> None:
        keys: list[Key] = [ALLOCATE, TrunkKey(ROWS, 0), SamplerKey(ROWS, "greedy")]
        super().__init__((key, lower(spec, key).compile()) for key in keys)


def make_runner(folder: Path, max_model_len: int, params: Params | None) -> Runner:
    """A runner of `ROWS` sequences whose tables hold CONTEXT tokens; the number of pages does not depend on max_model_len."""
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
    runner = Runner(spec, StepPrograms(spec), load(folder, model, mesh, progress=False) if params is None else params)  # type: ignore[arg-type]
    for index in range(pages):
        updates = [(slot, index, 1 + (slot - 1) * pages + index) for slot in range(1, ROWS + 1)]
        runner.read(runner.dispatch(decode(page_updates=updates)))
    return runner


def decode(page_updates: list[tuple[int, int, int]] | None = None) -> StepPlan:
    """A step in which every sequence reads its CONTEXT-th token."""
    slots = list(range(1, ROWS + 1))
    return StepPlan(
        TrunkKey(ROWS, 0), SamplerKey(ROWS, "greedy"), row_slots=slots, row_positions=[CONTEXT - 1] * ROWS, page_updates=page_updates or []
    )


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
    median = np.median(ms, axis=0)
    change = float(median[1] / median[0] - 1)
    ratios = np.percentile(ms[:, 1] / ms[:, 0] - 1, [25, 50, 75])
    result = {
        "table_width": [single.spec.table_width, double.spec.table_width],
        "steps": steps,
        "median_ms": median.round(3).tolist(),
        "quartiles_ms": np.percentile(ms, [25, 75], axis=0).T.round(3).tolist(),
        "change": round(change, 4),
        "change_by_pair_quartiles": ratios.round(4).tolist(),
    }
    print(f"\n{name}: {ROWS} rows at context {CONTEXT}, {steps} steps of each, ms\n\n{'table width':>12}{'median':>9}{'quartiles':>18}")
    for width, middle, (low, high) in zip(result["table_width"], median, np.percentile(ms, [25, 75], axis=0).T, strict=True):
        print(f"{width:12}{middle:9.2f}{low:9.2f}{high:9.2f}")
    low, middle, high = ratios
    print(f"change of the median: {change:+.1%}; by pair: {middle:+.1%} ({low:+.1%} to {high:+.1%}); the goal is under {GOAL:.0%}")
    return result


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
