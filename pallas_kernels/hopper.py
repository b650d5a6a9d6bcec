"""What the attention kernels for Hopper (sm_90a) share: shared memory's layout, products of a warpgroup, the softmax's scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup's product
COLUMNS = 64  # of a tile of shared memory
MASKED = -1e30  # finite, so that a row that has seen nothing yet gives no NaN
SMALLEST = 1e-30  # of a sum that is divided by
LOG2_E = math.log2(math.e)


def tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any]) -> Any:
    """Shared memory as TMA and the tensor cores want it: tiles of 8 rows by 64 numbers, swizzled."""
    tiles = plgpu.TilingTransform((8, COLUMNS))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(COLUMNS * dtype.itemsize)))  # type: ignore[abstract]


def per_row(value: float) -> jax.Array:
    """float32 [ROWS], each of them the value."""
    filled: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    return filled


def product(left: Any, right: Any, then: Callable[[], None] = lambda: None) -> jax.Array:
    """left [ROWS, n] @ right [n, columns] in float32, from shared memory; `then` is done while the tensor cores work."""

    def multiply(out: Any) -> Any:
        plgpu.wgmma(out, left, right)
        then()
        return out[...]

    result: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, right.shape[1]), jnp.float32))
    return result


def accumulate(acc: jax.Array, left: Any, right: Any) -> jax.Array:
    """acc [ROWS, n] + left @ right; in place if left is in registers."""
    if not isinstance(left, jax.Array):
        return acc + product(left, right)
    total: jax.Array = pl.run_state(lambda out: plgpu.wgmma(out, left, right))(plgpu.WGMMAAccumulatorRef.init(acc))
    return total


def logits(s: jax.Array, scale: float, soft_cap: float | None) -> tuple[jax.Array, float]:
    """Scores, and the positive factor that makes them scaled, capped and times log2(e): powers of two are what the hardware takes."""
    if soft_cap is None:
        return s, scale * LOG2_E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), since the hardware's own tanh has eleven bits; and 1 / y as rsqrt(y)^2, which takes
    # fewer registers than a division.
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(s * (2.0 * scale * LOG2_E / soft_cap)))
    return 1.0 - 2.0 * inverse_root * inverse_root, soft_cap * LOG2_E
