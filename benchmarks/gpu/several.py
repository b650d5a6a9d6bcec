"""Several devices of one machine that share a model: its answers, their sums, and a step of an 8B.

Answers are compared with float32 on a CPU and with one device. Sums are timed by size, with the kernels that
XLA chooses and with NCCL alone, beside what `jengine plan` assumes.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.gpu import answers, engine
from benchmarks.gpu.features import common
from benchmarks.gpu.llama import FULL, SMALL
from benchmarks.gpu.rows import FAILED, Row, attempt, skipped
from benchmarks.gpu.timing import CHAIN, median
from jengine.capacity.planning.links import Cluster
from jengine.devices.device_spec import device_spec
from jengine.execution.programs import WHOLE, CompilerOptions
from jengine.parallel.collectives import TENSOR
from jengine.parallel.layout import Layout
from jengine.parallel.mesh import make_mesh
from pallas_kernels.compilation.ahead_of_time import target_of

SIZES = 16 << 10, 128 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20  # bytes on each device
NCCL: CompilerOptions = {"xla_gpu_experimental_use_collective_kernels": ""}
KINDS: dict[str, CompilerOptions] = {"XLA's choice": WHOLE, "NCCL alone": WHOLE | NCCL}


def measure(small: bool) -> Iterator[Row]:
    """Yields rows for two devices and, of sums, for four and eight if there are as many."""
    if len(jax.devices()) < 2:
        yield skipped("several devices", f"there is one device, {jax.devices()[0].device_kind}")
        return
    yield from _answers(small)
    for count in (2, 4, 8):
        if count <= len(jax.devices()):
            yield from sums(count, SIZES[:1] if small else SIZES, small)
    yield from _steps(small)


def _answers(small: bool) -> Iterator[Row]:
    """The demo model on two devices: errors of log probabilities, and the greedy tokens of one device."""
    if not small:
        form = answers.Form("two devices", {"tensor_parallel_size": 2}, 0.02)
        yield from answers.of_form(form, answers.PROMPTS, answers.TOKENS)
    case = "two devices: greedy tokens in float32, as on one"
    yield attempt(case, partial(_greedy, case, answers.PROMPTS[: 2 if small else None], 8 if small else 96))


def _greedy(case: str, prompts: Sequence[str], tokens: int) -> Row:
    """Counts the tokens that are the same from the beginning. Sums are rounded in another order."""
    from jengine import LLM, SamplingParams

    params, found = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), []
    for devices in (1, 2):
        with LLM("demo", dtype="float32", tensor_parallel_size=devices, **answers.LIMITS) as llm:
            outputs = llm.generate(list(prompts), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    share = sum(map(common, *found)) / (len(prompts) * tokens)
    return Row(case, {"same tokens": share}, outcome="ok" if share > 0.5 else FAILED)


def sums(count: int, sizes: tuple[int, ...], small: bool) -> Iterator[Row]:
    """A row for each size and kind: microseconds of an all-reduce of bfloat16 in a command buffer."""
    for size in sizes:
        program, x = _program(count, size, {} if small else WHOLE, summed=False)
        between = median(partial(program, x))
        for name, options in ({"XLA's choice": {}} if small else KINDS).items():
            case = f"all-reduce, {count} devices, {size >> 10} KB, {name}"
            yield attempt(case, partial(_sum, case, count, size, options, between))


def _sum(case: str, count: int, size: int, options: CompilerOptions, between: float) -> Row:
    program, x = _program(count, size, options)
    seconds = (median(partial(program, x)) - between) / CHAIN
    values: dict[str, Any] = {"us": 1e6 * seconds, "GB/s": size / seconds / 1e9}
    if (target := target_of(jax.devices()[0])) is not None:
        cluster = Cluster.of(device_spec(target), count)
        cluster = dataclasses.replace(cluster, kernels=not NCCL.items() <= options.items())
        values["planned us"] = 1e6 * sum(cluster.all_reduce(size, cluster.tensor_group(Layout(tensor=count))))
    found = re.findall(r"KERNEL_STRATEGY_(\w+)", program.as_text())
    values |= {"strategy": found[0].lower()} if found else {}
    error = _error(np.asarray(program(x), np.float32), np.asarray(x, np.float32), count)
    return Row(case, values | {"error / allowed": error}, outcome="ok" if error <= 1 else FAILED)


def _program(
    count: int, size: int, options: CompilerOptions, *, summed: bool = True
) -> tuple[Callable[..., Any], jax.Array]:
    """A program of CHAIN sums with a small kernel after each, or of these kernels alone; and its argument.

    Each device adds its own index to the mean, so that its next summand is another's too.
    """
    mesh = make_mesh(count)
    over = NamedSharding(mesh, PartitionSpec(TENSOR))

    def run(x: jax.Array) -> jax.Array:
        for _ in range(CHAIN):
            total = lax.psum(x, TENSOR) if summed else lax.optimization_barrier(x)
            x = total / count + lax.axis_index(TENSOR).astype(x.dtype)
        return x

    mapped = jax.shard_map(run, mesh=mesh, in_specs=over.spec, out_specs=over.spec, check_vma=False)
    shape = jax.ShapeDtypeStruct((count, size // 2), jnp.bfloat16, sharding=over)
    x = jax.jit(lambda: jax.random.normal(jax.random.key(0), shape.shape, shape.dtype), out_shardings=over)()
    return jax.jit(mapped).lower(shape).compile(compiler_options=options), x


def _error(got: np.ndarray, x: np.ndarray, count: int) -> float:
    """The largest error, relative to what rounding each sum and mean to bfloat16 allows."""
    index = np.arange(count)[:, None]
    for _ in range(CHAIN):
        x = x.mean(0) + index
    allowed = CHAIN * math.log2(2 * count) * float(jnp.finfo(jnp.bfloat16).eps) * (np.abs(x).max() + 1)
    return float(np.abs(got - x).max() / allowed) if np.isfinite(got).all() else math.inf


def _steps(small: bool) -> Iterator[Row]:
    """Steps of an 8B on two devices and on one."""
    load = SMALL if small else FULL._replace(batches=(1, 32), steps=32, chunk=2048)
    alone: dict[str, float] = {}
    for devices in (1, 2):
        for row in engine.steps(load, small, devices):
            values, case = dict(row.values), row.case.split(", context")[0]
            if "ms" in values and case in alone:
                values["speed-up"] = alone[case] / values["ms"]
            elif "ms" in values:
                alone[case] = values["ms"]
            yield Row(f"{devices} devices: {row.case}", values, outcome=row.outcome, why=row.why)
        gc.collect()  # the first engine's weights
