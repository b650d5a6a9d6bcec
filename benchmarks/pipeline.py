"""Pipelines of 2 and 4 stages: the share of time in which the stages are busy at full load.

    python -m benchmarks.pipeline simulated
    python -m benchmarks.pipeline asleep
    python -m benchmarks.pipeline devices

`simulated` runs the scheduler on a virtual clock, with stages that take equally long for a step. It takes a
few seconds. `asleep` runs an engine whose stages are devices of the CPU that sleep in each step. It shows
what calls, transfers and the host cost, and needs one core. `devices` runs an engine whose devices compute,
so it needs as many idle cores as stages, and one for the host if its steps are short; see pipeline_devices.py
for what it counts. These two take a few minutes for each number of stages. Each part adds its figures to
results/pipeline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, facts, made_model
from jengine.capacity.simulation.fast_forward import StepTimes
from jengine.capacity.simulation.replay import EngineShape
from jengine.capacity.simulation.summary import Outcome
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.table.program_table import ProgramTable

STAGES = 2, 4
GOAL = 0.9
# seconds of one stage: to read its weights, and for each row and each tile
STEP, ROW, TILE = 8e-3, 2e-5, 1.5e-3
SAMPLER = 3e-4
SLEEP = 0.06  # seconds of a stage that sleeps, much longer than what the demo model computes


def load(requests: int, seed: int = 0) -> RequestTrace:
    """A number of requests at once, with log-normal lengths."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (
        np.clip(rng.lognormal(mean, deviation, requests), 4, 1000).astype(int)
        for mean, deviation in ((5.0, 0.8), (4.8, 0.6))
    )
    return make_trace([*zip(np.zeros(requests), prompts, outputs, strict=True)])


class Watched(VirtualEngine):
    """Notes the seconds for which a stage was busy until each step's end."""

    busy: list[tuple[float, float]]

    def run(self) -> Outcome:
        self.busy = []
        return super().run()

    def _device(self, seconds: float, overtakes: int = 0) -> None:
        super()._device(seconds, overtakes)
        self.busy.append((self._free[-1], self.outcome.device_seconds))


def simulate(stages: int, requests: int = 2000, max_num_seqs: int = 128) -> dict[str, float]:
    """The share of time in which each stage is busy while requests wait and until the last one has ended,
    tokens a second, and seconds between a sequence's tokens.
    """
    budget = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048}
    table = ProgramTable.build(tile_size=64, **budget)
    known = {key: STEP + key.rows * ROW + key.tiles * TILE for key in table.trunks()}
    costs = StepCosts(table, known | dict.fromkeys(table.samplers(), SAMPLER))
    cache = CacheShape(page_size=16, num_pages=128 * max_num_seqs)
    limits = BatchLimits(max_model_len=2048, stages=stages, **budget)
    shape = EngineShape(table=table, cache=cache, limits=limits, costs=costs)
    trace = load(requests)
    scheduler = shape.scheduler()
    engine = Watched(scheduler, StepTimes(costs), trace, np.arange(requests))
    outcome = engine.run()
    seconds, tokens = outcome.end - outcome.begin, int(trace.outputs.sum())
    full = max(outcome.first)  # until the last request has begun, as many run as may
    busy = next(busy for at, busy in engine.busy if at >= full)
    between = (outcome.last - outcome.first) / np.maximum(trace.outputs - 1, 1)
    return {
        "busy": float(busy / (full - outcome.begin)),
        "busy_to_the_end": outcome.device_seconds / seconds,
        "tokens_a_second": tokens / seconds,
        "seconds_between_tokens": float(np.median(between)),
        "steps": outcome.steps,
    }


def save(part: str, found: Any) -> None:
    path = RESULTS / "pipeline.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(every | {part: {**found, "machine": facts()}}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["simulated", "asleep", "devices"])
    parser.add_argument("--stages", type=int, help="of this one process, which needs as many devices")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="devices with the demo model; saves nothing")
    options = parser.parse_args()
    if options.stages is not None:
        from benchmarks.pipeline_devices import run_asleep, run_on_devices  # starts JAX

        if options.part == "asleep":
            print(json.dumps(run_asleep(options.stages, options.requests, SLEEP)))
        else:
            model = "demo" if options.quick else str(made_model("134m"))
            print(json.dumps(run_on_devices(options.stages, options.requests, model)))
        return
    found: dict[str, Any] = {}
    for stages in (1, *STAGES) if options.part == "simulated" else STAGES:
        if options.part == "simulated":
            found[str(stages)] = simulate(stages)
        else:
            command = [sys.executable, "-m", "benchmarks.pipeline", options.part, "--stages", str(stages)]
            command += ["--requests", str(options.requests), *(["--quick"] if options.quick else [])]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(stages)}
            lines = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[str(stages)] = json.loads(lines.stdout.splitlines()[-1])
        print(f"{stages} stages: {found[str(stages)]}; goal for busy: {GOAL}")
    if not options.quick:
        save(options.part, found)


if __name__ == "__main__":
    main()
