"""An engine whose stages are devices of the CPU: when each of them is busy."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.step_profile import Intervals, union
from jengine.core.config import EngineConfig
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.engine.start import start_engine
from jengine.execution.executor import Pipeline, Worker
from jengine.table.program_table import TrunkKey
from pallas_kernels.llvm import native
from pallas_kernels.llvm.calls import call, register

# One thread, since XLA adds one for each further device to the pool that the programs of all devices share,
# and a program that runs alone would use all of them.
OPTIONS = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 144,
    "dtype": "float32",
    "warm_up": "all",
    "cpu_threads": 1,
}
# a kernel; see pallas_kernels.llvm.calls
ASLEEP = """
declare i32 @usleep(i32)

define void @asleep(i64 %frame, i64 %part, i64 %parts) {{
  %failed = call i32 @usleep(i32 {microseconds})
  ret void
}}
"""
Wrap = Callable[[Worker, Any], Any]  # makes the stage's call


class Stages:
    """An engine with so many stages, and requests of random lengths for it."""

    def __init__(self, stages: int, requests: int, model: str) -> None:
        options = OPTIONS | {"pipeline_parallel_size": stages}
        self.engine: Any = start_engine(EngineConfig.of(model, options))[0]
        pipeline = self.engine.runner.worker
        assert isinstance(pipeline, Pipeline)
        self.stages = pipeline.workers
        self.lengths = np.random.default_rng(0).integers(8, 120, (requests, 2)).tolist()
        self.tokens = sum(output for _, output in self.lengths)

    def wrap(self, wrap: Wrap) -> None:
        """Lets `wrap` make the stages' calls from now on."""
        for stage in self.stages:
            stage.execute = lambda call, stage=stage: wrap(stage, call)  # type: ignore[method-assign]

    def run(self, full: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Seconds until all requests have ended, and the number of cores that worked on average.

        Args:
            full: called when the last request has begun. Until then as many run as may.
        """
        rng, waiting = np.random.default_rng(1), set[str]()
        for number, (prompt, output) in enumerate(self.lengths):
            tokens = rng.integers(2, self.engine.model.vocab_size, prompt).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
            self.engine.add(Request(request_id=str(number), prompt_token_ids=tokens, params=params))
            waiting.add(str(number))
        begun, used = time.perf_counter(), sum(os.times()[:2])
        while self.engine.has_work:
            updates = self.engine.step()
            if waiting:
                waiting -= {update.request_id for update in updates if isinstance(update, TokenUpdate)}
                if not waiting:
                    full()
        seconds = time.perf_counter() - begun
        return seconds, (sum(os.times()[:2]) - used) / seconds


def waits(stage: Worker, call: Any) -> Any:
    """The call of a stage for which all others wait."""
    result = Worker.execute(stage, call)
    jax.block_until_ready((stage.state.cache, stage.state.slots, stage.state.leaving, result))
    return result


def run_on_devices(stages: int, requests: int, model: str) -> dict[str, Any]:
    """The share of time in which the stages compute, while as many requests run as may. A stage computes from
    the begin of a program's first operation to the end of its last one, in a profile.

    Args:
        stages: the devices that this process must have.
    """
    engine = Stages(stages, requests, model)
    engine.run()  # so that the costs settle
    engine.wrap(waits)
    waiting, alone = engine.run()
    engine.wrap(Worker.execute)
    seconds, cores = engine.run()
    return {
        **busy(engine),
        "tokens_a_second": engine.tokens / seconds,
        "tokens_a_second_if_stages_wait": engine.tokens / waiting,
        "cores": cores,
        "cores_if_stages_wait": alone,
    }


def run_asleep(stages: int, requests: int, seconds: float) -> dict[str, Any]:
    """Run the demo model in stages that sleep so many seconds in each step, so that they need no
    core. They count as busy while they sleep.
    """
    engine = Stages(stages, requests, "demo")
    text = ASLEEP.format(microseconds=round(1e6 * seconds))
    name = register("jengine_benchmark_sleep", lambda: native.compiled(lambda: text, "asleep"))

    @jax.jit
    def sleep(hidden: jax.Array, last: jax.Array) -> Any:
        """Return the arrays after the sleep."""
        # XLA runs a program of fewer than 1,000 operations in its caller's thread, and counts none of a call
        work = (hidden[0][:, None] * hidden[0]).max()
        return *jax.lax.optimization_barrier((hidden, last)), call(name, work, work)

    def execute(stage: Worker, called: Any) -> Any:
        result, state = Worker.execute(stage, called), stage.state
        if isinstance(called.key, TrunkKey) and state.spec.stage.last:
            hidden, last, _ = sleep(state.to_sample.hidden, state.slots.last)  # type: ignore[union-attr]
            state.to_sample = state.to_sample._replace(hidden=hidden)  # type: ignore[union-attr]
            state.slots = state.slots._replace(last=last)
        elif isinstance(called.key, TrunkKey):
            state.leaving, last, _ = sleep(state.leaving, state.slots.last)  # type: ignore[arg-type]
            state.slots = state.slots._replace(last=last)
        return result

    engine.wrap(execute)
    engine.run()  # so that the costs settle
    return busy(engine)


def busy(engine: Stages) -> dict[str, Any]:
    """The share of time in which each stage has a program under way until the last request has begun, and the
    mean of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        engine.run(jax.profiler.stop_trace)
        profile = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    spans: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)  # by device and run
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        facts = dict(event.stats)
        if "hlo_op" in facts:
            own, run = spans[facts["device_ordinal"]], facts["run_id"]
            begin, end = own.get(run, (event.start_ns, event.end_ns))
            own[run] = min(begin, event.start_ns), max(end, event.end_ns)
    intervals: list[Intervals] = [[*spans[device].values()] for device in range(len(engine.stages))]
    begun = min(begin for own in intervals for begin, _ in own)
    seconds = (max(end for own in intervals for _, end in own) - begun) / 1e9
    each = [union(own) / seconds for own in intervals]
    return {"busy": sum(each) / len(each), "each": each}
