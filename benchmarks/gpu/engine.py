"""The engine on a Llama with random weights, of 8B parameters if they fit: tokens per second relative to the
roofline, and host time per step.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.gpu.ceilings import Ceilings, ceilings
from benchmarks.gpu.inputs import free_bytes
from benchmarks.gpu.llama import SMALL, Load, largest, tokens_out
from benchmarks.gpu.model import compiled, random_params
from benchmarks.gpu.rows import Row, skipped
from benchmarks.host_cost import Clock
from jengine.capacity.planning.links import Cluster
from jengine.capacity.planning.memory import formats_of
from jengine.capacity.planning.roofline import Batch, Roofline
from jengine.checkpoints.hugging_face import model_config
from jengine.core.request import Request, SamplingParams
from jengine.core.updates import TokenUpdate
from jengine.devices.device_spec import device_spec
from jengine.engine.loop.engine import Engine
from jengine.engine.setup.shapes import page_buckets
from jengine.execution.executor import Worker
from jengine.execution.kernels import kernels_refused
from jengine.execution.kinds import TRUNK
from jengine.execution.runner import Runner
from jengine.execution.spec import ExecutionSpec
from jengine.models import build
from jengine.parallel.mesh import make_mesh
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.shape import BatchLimits, CacheShape
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable

DECODE_GOAL, PREFILL_GOAL = 0.8, 0.6
ROUNDS = 3  # measured rounds of prefill
CALLS = 32  # of a program


class How(NamedTuple):
    """The engine's settings. threads: number of threads that compile."""

    dtype: str
    tile_size: int
    page_size: int
    threads: int


GPU, CPU = How("bfloat16", 64, 64, 12), How("float32", 16, 16, 1)


def measure(small: bool) -> Iterator[Row]:
    yield from steps(SMALL if small else largest(free_bytes()), small)


def steps(size: Load, small: bool, devices: int = 1) -> Iterator[Row]:
    """Yields rows of an engine with this load. Shares are relative to the peak rates of all its devices."""
    limits = Ceilings(*(devices * peak for peak in ceilings(small)))
    start = time.perf_counter()
    spec, engine = make_engine(size, CPU if small else GPU, devices)
    refused = kernels_refused(spec)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(spec.params))
    values = {"s": time.perf_counter() - start, "parameters": f"{parameters / 1e9:.1f}B"}
    yield Row("weights drawn, programs compiled", values)
    if refused is not None:
        yield skipped("attention's kernels, XLA's forms take their place", refused)
    # operations and bytes; they do not depend on the device
    roofline = Roofline(spec.model, formats_of(spec), Cluster.of(device_spec("h100"), 1))
    for prompt in (size.chunk, size.prompt):
        seconds = prefill_seconds(engine, size.chunk // prompt, prompt)
        done = (
            sum(operations for _, operations, _ in roofline.parts(Batch(0, 0, size.chunk, prompt))) / seconds
        )
        values = {
            "ms": 1e3 * seconds,
            "tokens/s": size.chunk / seconds,
            "TFLOP/s": done / 1e12,
            "share": done / limits.rate,
        }
        yield Row(f"prefill, {size.chunk // prompt} x {prompt}", values, None if small else PREFILL_GOAL)
    clock = Clock()
    clock.wrap(Runner, "read", "read")
    for batch in size.batches:
        seconds, host, context = decode_seconds(engine, batch, size, clock)
        read = sum(moved for moved, _, _ in roofline.parts(Batch(batch, round(context))))
        values = {
            "ms": 1e3 * seconds,
            "tokens/s": batch / seconds,
            "GB/s": read / seconds / 1e9,
            "host ms": 1e3 * host,
        }
        share = {"share": read / limits.bandwidth / seconds}
        yield Row(
            f"decode, batch {batch}, context {context:.0f}", values | share, None if small else DECODE_GOAL
        )
    if devices == 1:
        yield from launches(engine.runner)


def make_engine(size: Load, how: How, devices: int = 1) -> tuple[ExecutionSpec, Engine]:
    """An engine with a trunk for each batch, and two trunks with a prefill chunk: with the smallest and the
    largest batch.
    """
    rows = tuple(sorted({max(batch, 8) for batch in size.batches}))
    max_model_len = max(size.chunk + 8, size.prompt + tokens_out(size, rows[-1]))
    pages = max(
        rows[-1] * -(-(size.prompt + tokens_out(size, rows[-1])) // how.page_size),
        -(-max_model_len // how.page_size),
    )
    facts = model_config(size.config)
    spec = ExecutionSpec(
        model=build(facts, how.dtype, max_model_len, shards=devices),
        mesh=make_mesh(devices),
        table=ProgramTable(
            rows, tuple(sorted({rows[0], rows[-1]})), (size.chunk // how.tile_size,), how.tile_size
        ),
        max_model_len=max_model_len,
        max_slots=rows[-1],
        page_size=how.page_size,
        num_pages=1 + pages + rows[-1],  # admission leaves one free page for each sequence
    )
    if jax.default_backend() != "cpu" and kernels_refused(spec) is not None:
        spec = dataclasses.replace(
            spec, table=dataclasses.replace(spec.table, page_buckets=page_buckets(spec.table_width))
        )
    params = random_params(spec)
    runner = Runner(Worker(spec, compiled(spec, how.threads), params))  # type: ignore[arg-type]
    scheduler = Scheduler(
        spec.table,
        CacheShape(page_size=spec.page_size, num_pages=spec.num_pages),
        BatchLimits(
            max_num_seqs=spec.max_slots,
            max_num_batched_tokens=rows[-1] + size.chunk,
            max_model_len=max_model_len,
        ),
    )
    return spec, Engine(facts, runner, scheduler)


def prefill_seconds(engine: Engine, prompts: int, tokens: int) -> float:
    """Seconds of a step that prefills whole prompts with one output token each, averaged over several
    consecutive steps.
    """
    steps, took = 4, []
    for _ in range(1 + ROUNDS):
        add(engine, steps * prompts, tokens, 1)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        took.append((time.perf_counter() - start) / steps)
    return statistics.median(took[1:])


def decode_seconds(engine: Engine, batch: int, size: Load, clock: Clock) -> tuple[float, float, float]:
    """Median seconds per step, median host seconds per step (not waiting for the device), and the mean length
    of a sequence.
    """
    add(engine, batch, size.prompt, tokens_out(size, batch))
    made: Counter[str] = Counter()

    def step() -> None:
        made.update(update.request_id for update in engine.step() if isinstance(update, TokenUpdate))

    while len(made) < batch:
        step()
    for _ in range(size.steps // 4):
        step()
    before, whole, host = sum(made.values()), [], []
    clock.take()
    for _ in range(size.steps):
        start = time.perf_counter()
        step()
        whole.append(time.perf_counter() - start)
        host.append(whole[-1] - clock.take()["read"])
    context = size.prompt + (before + sum(made.values())) / 2 / batch
    while engine.has_work:
        engine.step()
    return statistics.median(whole), statistics.median(host), context


def launches(runner: Any) -> Iterator[Row]:
    """Yields the host's time to call the smallest trunk, with a new buffer in each call as in the engine, and
    with one that stays on the device, so that no address in XLA's CUDA graph changes.
    """
    worker: Any = runner.worker
    state, spec = worker.state, runner.spec
    key = min(spec.table.trunks(), key=lambda key: (key.tiles, key.rows))
    packed = spec.layout(key).pack(StepPlan(key, spec.table.sampler(key, "greedy")))
    kept = jax.device_put(packed)
    for case, buffer in (("a new buffer", packed), ("the same buffer", kept)):
        took = []
        for _ in range(CALLS):
            start = time.perf_counter()
            TRUNK.run(state, key, buffer)
            took.append(time.perf_counter() - start)
            jax.block_until_ready(state.to_sample)
        yield Row(f"call of a trunk of {key.rows} rows, {case}", {"host ms": 1e3 * statistics.median(took)})


def add(engine: Engine, count: int, prompt: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(count):
        ids = rng.integers(2, engine.model.vocab_size, prompt).tolist()
        engine.add(Request(request_id=str(i), prompt_token_ids=ids, params=params))
