"""Products of rows with quantized weights: checked first, then timed against the bandwidth and the matrix
products of the device. XLA's products with bfloat16 weights are timed beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.ceilings import Ceilings, ceilings
from benchmarks.gpu.correctness import compare
from benchmarks.gpu.rows import FAILED, Row, attempt, skipped
from benchmarks.gpu.timing import CHAIN, chained
from pallas_kernels.products import dispatch as product_dispatch
from pallas_kernels.products.weights import stored
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.int4 import E2M1, pack, quantize_int4
from pallas_kernels.quantization.quantized import Quantized, dequantize, quantize

GOAL = 0.7


class Load(NamedTuple):
    """The number of inputs and of outputs (`hidden`), and numbers of rows to measure."""

    hidden: int
    rows: tuple[int, ...]


FULL, SMALL = Load(4096, (1, 8, 16, 32, 64, 128, 256, 512, 2048)), Load(128, (1, 9))


def _mxfp4(x: jax.Array) -> Any:
    """Quantizes x to MXFP4 in groups of 32, with a scale that maps the largest magnitude to the largest
    number.
    """
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 32)
    scale = jnp.abs(groups).max(-1) / max(E2M1)
    levels = jnp.array(E2M1)
    nearest = levels[jnp.abs(jnp.abs(groups / scale[..., None])[..., None] - levels).argmin(-1)]
    numbers = jnp.where(groups < 0, -nearest, nearest).astype(jnp.int8).reshape(x.shape)
    return pack(numbers, scale, None, group=32, dtype=str(x.dtype), kind="e2m1")


KINDS: dict[str, Callable[[jax.Array], Any]] = {
    "int8": partial(quantize, dtype="int8"),
    "fp8 by fp8": partial(quantize, dtype=FP8, inputs=True),
    "fp8 by fp8, both in groups of 128": partial(quantize, dtype=FP8, inputs=True, by_group=True),
    "int4": partial(quantize_int4, group=128),
    "int4 in groups of 64": partial(quantize_int4, group=64),
    "int4 in groups of 32": partial(quantize_int4, group=32),
    "MXFP4": _mxfp4,
}


def measure(small: bool) -> Iterator[Row]:
    """Yields a row for each kind of weight and number of rows. Few rows are bound by memory, many by the
    tensor cores.
    """
    load, most = SMALL if small else FULL, ceilings(small)
    weights = _weights(load, None)
    for rows in load.rows:
        case = f"bfloat16 weights, {rows} rows, XLA"
        yield attempt(case, partial(_plain, case, load, weights, rows, most))
    for kind in KINDS:
        weights = _weights(load, kind)
        for rows in load.rows:
            x: Any = jax.ShapeDtypeStruct((rows, load.hidden), jnp.bfloat16)
            one = jax.eval_shape(lambda weights: jax.tree.map(lambda array: array[0], weights), weights)
            refused = None if small else product_dispatch.why_product_unsupported(x, one, grouped=False)
            case = f"{kind} weights, {rows} rows"
            yield (
                skipped(case, refused)
                if refused
                else attempt(case, partial(_row, case, load, weights, rows, most, small))
            )


def _weights(load: Load, kind: str | None) -> Any:
    """Random weights [CHAIN, out, in], scaled so that results are about as large as inputs; of a kind, or
    bfloat16.
    """

    def draw(key: jax.Array) -> Any:
        plain = jax.random.normal(key, (load.hidden, load.hidden), jnp.bfloat16) * load.hidden**-0.5
        return plain if kind is None else KINDS[kind](plain)

    return jax.jit(lambda: jax.lax.map(draw, jax.random.split(jax.random.key(0), CHAIN)))()


def _plain(case: str, load: Load, weights: jax.Array, rows: int, most: Ceilings) -> Row:
    x = _inputs(load, rows)
    return Row(case, _rates(x, weights[0], chained(lambda x, weight: x @ weight.T, x, weights), most))


def _inputs(load: Load, rows: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, load.hidden)).astype(jnp.bfloat16)


def _rates(x: jax.Array, weight: Any, seconds: float, most: Ceilings) -> dict[str, float]:
    """What a product moves and computes in a second, and the larger share of the device's peak rates."""
    moved = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(weight)) + 4 * x.size
    operations = 2 * x.size * x.shape[1]
    return {
        "us": 1e6 * seconds,
        "GB/s": moved / seconds / 1e9,
        "TFLOP/s": operations / seconds / 1e12,
        "share": max(moved / seconds / most.bandwidth, operations / seconds / most.rate),
    }


def _row(case: str, load: Load, weights: Any, rows: int, most: Ceilings, small: bool) -> Row:
    x = _inputs(load, rows)

    def run(x: jax.Array, weight: Any) -> jax.Array:
        return stored(weight).on_gpu(x, x.dtype, impl="xla" if small else "mosaic")

    first = jax.tree.map(lambda array: array[0], weights)
    error = _error(jax.jit(run)(x, first), x, first)
    values = _rates(x, first, chained(run, x, weights), most) | {"error / allowed": error}
    right = "ok" if small else ""
    return Row(case, values, None if small else GOAL, outcome=right if error <= 1 else FAILED)


def _error(got: jax.Array, x: jax.Array, weight: Any) -> float:
    """The largest error, relative to the error allowed for rounding the result and dequantized weights."""
    wide, rows = dequantize(weight).astype(jnp.float32), x.astype(jnp.float32)
    if isinstance(weight, Quantized) and weight.inputs:
        rows = dequantize(quantize(rows, weight.kind, by_group=weight.by_group))
    want = np.asarray(jnp.einsum("oi,ri->ro", wide, rows, precision="highest"))
    scaled = 2 * float(jnp.finfo(jnp.bfloat16).eps)
    return compare(got, want, scaled * (np.abs(want) + np.abs(want).max(-1, keepdims=True))).worst
