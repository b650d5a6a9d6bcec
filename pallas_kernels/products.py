"""Products of activations and weights kept output-major, [out, in]: plain, or eight-bit with a scale for each output.

A CPU has kernels for one row and, of plain weights, for a few (`cpu/products.py`). For more, XLA's product reads a converted copy of
eight-bit weights from memory, unless the conversion goes block by block through the cache; eight-bit numbers on both
sides it multiplies natively (VNNI, AMX).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import Quantized, quantize

LAST = (((1,), (1,)), ((), ()))  # contract the last axes
BLOCK = 64  # outputs converted at a time
CONVERTED_ROWS = 64  # up to which that pays


@cache
def cpu_refused() -> str | None:
    """Why a CPU has no kernels here, or None if it has."""
    return "numba is not installed" if importlib.util.find_spec("numba") is None else None


def prepare(weight: Any) -> None:
    """Make known to XLA what a CPU's programs call to multiply by this, an array or Quantized or what has its shape and dtypes."""
    if cpu_refused() is None:
        from pallas_kernels.cpu import products

        products.prepare(weight.values.dtype if isinstance(weight, Quantized) else weight.dtype)


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
    kernel = _cpu_kernel(x, weight)
    if kernel is None:
        return _any_rows(x, weight, dtype)

    def on_cpu(x: jax.Array, weight: jax.Array) -> jax.Array:
        return kernel(x, weight).astype(dtype)

    y: jax.Array = lax.platform_dependent(x, weight, cpu=on_cpu, default=partial(_any_rows, dtype=dtype))
    return y


def _cpu_kernel(x: jax.Array, weight: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    """What multiplies these on a CPU, if XLA does not. None where another device is the default: what is traced there is for that one."""
    device = jax.config.jax_default_device or jax.devices()[0]
    if getattr(device, "platform", device) != "cpu" or cpu_refused() is not None:
        return None
    from pallas_kernels.cpu import products

    return products.kernel_of(x, weight)


def _any_rows(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # or GPUs multiply float32 as tf32
    return lax.dot_general(x, weight, LAST, precision=precision, preferred_element_type=dtype)


def _converted(x: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [rows, out]."""
    return _any_rows(x, values.astype(x.dtype), jnp.float32)


def _converted_by_block(x: jax.Array, values: jax.Array) -> jax.Array:
    kernel = _cpu_kernel(x, values)
    if kernel is not None:
        return kernel(x, values)
    out, size = values.shape
    if x.shape[0] > CONVERTED_ROWS or out % BLOCK:
        return _converted(x, values)
    y: jax.Array = lax.map(lambda block: _converted(x, block), values.reshape(-1, BLOCK, size))  # [blocks, rows, BLOCK]
    return y.transpose(1, 0, 2).reshape(x.shape[0], out)
