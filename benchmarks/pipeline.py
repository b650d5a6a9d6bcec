"""Pipelines of 2 and 4 stages: the share of time in which the stages are busy at full load.

    python -m benchmarks.pipeline simulated
    python -m benchmarks.pipeline devices

`simulated` runs the scheduler on a virtual clock, with stages that take equally long for a step. It takes a
few seconds. `devices` runs an engine whose stages are devices of the CPU, each with one thread, so it needs
as many idle cores as stages; it takes a few minutes for each number of stages. Each adds its figures to
results/pipeline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import numpy as np

from benchmarks.machine import RESULTS, facts, made_model
from jengine.capacity.simulation.outcome import Outcome
from jengine.capacity.simulation.replay import EngineShape
from jengine.capacity.simulation.times import StepTimes
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.request import Request, SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.table.program_table import ProgramTable

STAGES = 2, 4
GOAL = 0.9
# seconds of one stage: to read its weights, and for each row and each tile
STEP, ROW, TILE = 8e-3, 2e-5, 1.5e-3
SAMPLER = 3e-4


def load(requests: int, seed: int = 0) -> RequestTrace:
    """So many requests at once, with log-normal lengths."""
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
    pages = {"page_size": 16, "num_pages": 128 * max_num_seqs, "max_model_len": 2048}
    shape = EngineShape(table=table, costs=costs, **pages, **budget)  # type: ignore[arg-type]
    trace = load(requests)
    scheduler = shape.scheduler(stages=stages)
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


def run_on_devices(stages: int, requests: int, model: str) -> dict[str, float]:
    """The same on devices of the CPU, in this process, which must have as many. A run whose stages wait for
    each other tells how long each program takes alone.
    """
    import jax

    from jengine.core.config import EngineConfig
    from jengine.engine.start import start_engine
    from jengine.execution.pipeline import Pipeline

    options = {
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 144,
        "dtype": "float32",
        "warm_up": "all",
        "pipeline_parallel_size": stages,
        "cpu_threads": stages,
    }
    engine: Any = start_engine(EngineConfig.of(model, options))[0]
    pipeline = engine.runner.worker
    assert isinstance(pipeline, Pipeline)
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 120, (requests, 2)).tolist()

    def run() -> float:
        for number, (prompt, output) in enumerate(lengths):
            tokens = rng.integers(2, engine.model.vocab_size, prompt).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            engine.add(Request(request_id=str(number), prompt_token_ids=tokens, params=params))
        begun = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - begun

    calls: list[dict[Any, list[float]]] = [defaultdict(list) for _ in range(stages)]

    def timed(number: int, *, wait: bool) -> Any:
        stage, execute = pipeline.stages[number], type(pipeline.stages[number]).execute

        def run_call(call: Any) -> Any:
            arrays = stage.state.cache, stage.state.slots, stage.state.entering
            if wait:
                jax.block_until_ready(arrays)
            begun = time.perf_counter()
            result = execute(stage, call)
            if wait:
                jax.block_until_ready((stage.state.cache, stage.state.slots, result))
            calls[number][call.key].append(time.perf_counter() - begun)
            return result

        return run_call

    run()  # so that the costs settle
    for number, stage in enumerate(pipeline.stages):
        stage.execute = timed(number, wait=True)  # type: ignore[method-assign]
    waiting = run()
    alone = [{key: float(np.median(times)) for key, times in own.items()} for own in calls]
    calls = [defaultdict(list) for _ in range(stages)]
    for number, stage in enumerate(pipeline.stages):
        stage.execute = timed(number, wait=False)  # type: ignore[method-assign]
    seconds = run()
    busy = [
        sum(len(times) * own.get(key, float(np.median([*own.values()]))) for key, times in mine.items())
        for own, mine in zip(alone, calls, strict=True)
    ]
    tokens = sum(output for _, output in lengths)
    return {
        "busy": float(sum(busy) / stages / seconds),
        "busiest": max(busy) / seconds,
        "tokens_a_second": tokens / seconds,
        "tokens_a_second_if_stages_wait": tokens / waiting,
    }


def save(part: str, found: Any) -> None:
    path = RESULTS / "pipeline.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(every | {part: {**found, "machine": facts()}}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=["simulated", "devices"])
    parser.add_argument("--stages", type=int, help="of this one process")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="with the demo model, which saves nothing")
    options = parser.parse_args()
    if options.stages is not None:
        model = "demo" if options.quick else str(made_model("134m"))
        print(json.dumps(run_on_devices(options.stages, options.requests, model)))
        return
    found: dict[str, Any] = {}
    for stages in (1, *STAGES) if options.part == "simulated" else STAGES:
        if options.part == "simulated":
            found[str(stages)] = simulate(stages)
        else:
            command = [sys.executable, "-m", "benchmarks.pipeline", "devices", "--stages", str(stages)]
            command += ["--requests", str(options.requests), *(["--quick"] if options.quick else [])]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(stages)}
            lines = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found[str(stages)] = json.loads(lines.stdout.splitlines()[-1])
        print(f"{stages} stages: {found[str(stages)]}; goal for busy: {GOAL}")
    if not options.quick:
        save(options.part, found)


if __name__ == "__main__":
    main()
