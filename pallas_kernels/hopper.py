"""Common parts of the kernels for Hopper (sm_90a): layouts of shared memory, and products of a warpgroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.versions import store

ROWS = 64  # of a warpgroup's product
COLUMNS = 64  # of a tile of shared memory


def tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any], columns: int = COLUMNS) -> Any:
    """Shared memory in the layout of TMA and the tensor cores: tiles of 8 rows by `columns` numbers, swizzled."""
    tiles = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(columns * dtype.itemsize)))  # type: ignore[abstract]


def store_transposed(target: Any, values: jax.Array) -> None:
    """Writes values [ROWS, n] to shared memory [n, ROWS]."""
    if values.dtype == jnp.float32:  # no instruction transposes these
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    store(target.transpose((1, 0)), values)


def per_row(value: float) -> jax.Array:
    """float32 [ROWS] filled with the value."""
    filled: jax.Array = plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    return filled


def product(left: Any, right: Any, then: Callable[[], None] = lambda: None) -> jax.Array:
    """left [ROWS, n] @ right [n, columns] in float32, from shared memory; `then` runs while the tensor cores work."""

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
