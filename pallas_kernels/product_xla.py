"""XLA's form of a product, for any device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import traced_for_cpu
from pallas_kernels.hadamard import transform
from pallas_kernels.int4 import Int4, wide
from pallas_kernels.quantized import Quantized, dequantize, quantize

Weight = jax.Array | Quantized | Int4

LAST = (((1,), (1,)), ((), ()))  # contract the last axes
ROW_GRID = 8  # on a GPU, a single row is padded to this many
BLOCK = 64  # outputs that XLA's form converts at a time
CONVERTED_ROWS = 64  # maximum rows for which that pays


def by_xla(x: jax.Array, weight: Weight, dtype: jnp.dtype[Any]) -> jax.Array:
    """`product` by XLA, for any device. Four-bit weights are dequantized."""
    if isinstance(weight, Int4):
        return _any_rows(transform(x, weight.hadamard).astype(x.dtype), wide(weight).astype(x.dtype), dtype)
    if not isinstance(weight, Quantized):
        return _any_rows(x, weight, dtype)
    if weight.by_group:
        return _any_rows(x, dequantize(weight).astype(x.dtype), dtype)
    if weight.inputs:
        rows = quantize(transform(x, weight.hadamard), weight.kind)
        return of_eight_bits(rows.values, rows.scale, weight, dtype)
    y: jax.Array = lax.platform_dependent(x, weight.values, cpu=_converted_by_block, default=_converted)
    return (y * weight.scale).astype(dtype)


def of_eight_bits(
    values: jax.Array, scale: jax.Array, weight: Quantized, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The product of quantized rows [rows, in], with scales [rows], and a weight with `inputs`, by XLA."""
    sums = _any_rows(values, weight.values, jnp.int32 if weight.kind == "int8" else jnp.float32)
    return (sums.astype(jnp.float32) * scale[:, None] * weight.scale).astype(dtype)


def _any_rows(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    if len(x) == 1 and x.dtype.itemsize == 2 and jnp.dtype(dtype) == jnp.float32 and not traced_for_cpu():
        # For a single row, XLA would write a float32 copy of the weight in every step.
        return _any_rows(jnp.pad(x, ((0, ROW_GRID - 1), (0, 0))), weight, dtype)[:1]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # GPUs would otherwise use tf32
    return lax.dot_general(x, weight, LAST, precision=precision, preferred_element_type=dtype)


def _converted(x: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [rows, out]."""
    return _any_rows(x, values.astype(x.dtype), jnp.float32)


def _converted_by_block(x: jax.Array, values: jax.Array) -> jax.Array:
    """The same as `_converted` on a CPU. Blocks fit the processor's cache; a converted copy of the whole
    weight would not.
    """
    out, size = values.shape
    if x.shape[0] > CONVERTED_ROWS or out % BLOCK:
        return _converted(x, values)
    # [blocks, rows, BLOCK]
    y: jax.Array = lax.map(lambda block: _converted(x, block), values.reshape(-1, BLOCK, size))
    return y.transpose(1, 0, 2).reshape(x.shape[0], out)
