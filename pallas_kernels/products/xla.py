"""XLA's form of a product, for any device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.devices import traced_for_cpu
from pallas_kernels.products.groups import Groups
from pallas_kernels.quantization.quantized import Quantized

GROUPED = lax.RaggedDotDimensionNumbers(  # x [rows, in] by weight [groups, out, in]
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
LAST = (((1,), (1,)), ((), ()))  # contract the last axes
ROW_GRID = 8  # on a GPU, a single row is padded to this many
BLOCK = 64  # outputs that XLA's form converts at a time
CONVERTED_ROWS = 64  # maximum rows for which that pays


def multiply(x: jax.Array, weight: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x [rows, in] times weight [out, in] -> [rows, out]."""
    if len(x) == 1 and x.dtype.itemsize == 2 and jnp.dtype(dtype) == jnp.float32 and not traced_for_cpu():
        # For a single row, XLA would write a float32 copy of the weight in every step.
        return multiply(jnp.pad(x, ((0, ROW_GRID - 1), (0, 0))), weight, dtype)[:1]
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # GPUs would otherwise use tf32
    return lax.dot_general(x, weight, LAST, precision=precision, preferred_element_type=dtype)


def multiply_converted(x: jax.Array, values: jax.Array) -> jax.Array:
    """x [rows, in] times eight-bit values [out, in], converted to x's dtype -> float32 [rows, out]."""
    y: jax.Array = lax.platform_dependent(x, values, cpu=_converted_by_block, default=_converted)
    return y


def of_eight_bits(
    values: jax.Array, scale: jax.Array, weight: Quantized, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The product of quantized rows [rows, in], with scales [rows], and a weight with `inputs`."""
    sums = multiply(values, weight.values, jnp.int32 if weight.kind == "int8" else jnp.float32)
    return (sums.astype(jnp.float32) * scale[:, None] * weight.scale).astype(dtype)


def _converted(x: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [rows, out]."""
    return multiply(x, values.astype(x.dtype), jnp.float32)


def _converted_by_block(x: jax.Array, values: jax.Array) -> jax.Array:
    """`_converted` on a CPU. Blocks fit the processor's cache; a converted copy of the whole
    weight would not.
    """
    out, size = values.shape
    if x.shape[0] > CONVERTED_ROWS or out % BLOCK:
        return _converted(x, values)
    # [blocks, rows, BLOCK]
    y: jax.Array = lax.map(lambda block: _converted(x, block), values.reshape(-1, BLOCK, size))
    return y.transpose(1, 0, 2).reshape(x.shape[0], out)


def grouped_product(x: jax.Array, weight: jax.Array, scale: jax.Array | None, groups: Groups) -> jax.Array:
    """`grouped_product.grouped_product` for any dtype. Eight-bit weights are all converted."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dtype = x.dtype if scale is None else jnp.float32  # unscaled sums may exceed float16's range
    y = lax.ragged_dot_general(
        x, weight.astype(x.dtype), groups.size, GROUPED, precision=precision, preferred_element_type=dtype
    )
    return y if scale is None else (y * scale[groups.owner]).astype(x.dtype)
