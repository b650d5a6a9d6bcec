"""Products of activations and weights kept output-major, [out, in]: plain, or eight-bit with a scale for each output.

A CPU's matrix product reads a converted copy of eight-bit weights from memory, unless rows are few and the conversion goes
block by block through the cache; eight-bit numbers on both sides it multiplies natively (VNNI, AMX).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import Quantized, quantize

LAST = (((1,), (1,)), ((), ()))  # contract the last axes
BLOCK = 64  # outputs converted at a time
FEW = 64  # rows up to which that pays


def product(x: jax.Array, weight: jax.Array | Quantized, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [rows, in], weight [out, in] -> [rows, out], in x's dtype or the given one. Sums are float32, or int32 of int8 numbers."""
    dtype = jnp.dtype(dtype or x.dtype)
    if not isinstance(weight, Quantized):
        return _dot(x, weight, dtype)
    if weight.inputs:
        rows = quantize(x, weight.kind)
        sums = _dot(rows.values, weight.values, jnp.int32 if weight.kind == "int8" else jnp.float32)
        return (sums.astype(jnp.float32) * rows.scale[:, None] * weight.scale).astype(dtype)
    y: jax.Array = lax.platform_dependent(x, weight.values, cpu=_converted_by_block, default=_converted)
    return (y * weight.scale).astype(dtype)


def _dot(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # or GPUs multiply float32 as tf32
    return lax.dot_general(x, weight, LAST, precision=precision, preferred_element_type=dtype)


def _converted(x: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [rows, out]."""
    return _dot(x, values.astype(x.dtype), jnp.float32)


def _converted_by_block(x: jax.Array, values: jax.Array) -> jax.Array:
    out, size = values.shape
    if x.shape[0] > FEW or out % BLOCK:
        return _converted(x, values)
    y: jax.Array = lax.map(lambda block: _converted(x, block), values.reshape(-1, BLOCK, size))  # [blocks, rows, BLOCK]
    return y.transpose(1, 0, 2).reshape(x.shape[0], out)
