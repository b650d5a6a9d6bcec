"""Common parts of the kernels for Hopper (sm_90a): layouts of shared memory, and products of a warpgroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels.mosaic.versions import store

ROWS = 64  # of a warpgroup's product
COLUMNS = 64  # of a tile of shared memory


def tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any], columns: int = COLUMNS, rows: int = 8) -> Any:
    """Shared memory in the layout of TMA and the tensor cores: tiles of 8 rows by `columns` numbers,
    swizzled.

    TMA copies whole tiles, so copies of fewer rows need smaller ones. Then use them for arrays of `columns`
    columns only: in wider ones, the columns after the first tile begin inside the swizzle's pattern of 8
    rows, see `tools/swizzle_check.py`.
    """
    tiles = plgpu.TilingTransform((rows, columns))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(columns * dtype.itemsize)))  # type: ignore[abstract]


def in_one_warp(run: Callable[[], None]) -> None:
    """Runs a function in one warp of the warpgroup.

    All four would issue the same instructions, and wait for each other before each copy.
    """
    plgpu.warp_map(lambda warp: pl.when(warp == 0)(run))


def copy_rows_out(smem: Any, target: Any) -> None:
    """Copies the first rows of smem [parts, rows, COLUMNS] to global memory [fewer rows, parts * COLUMNS],
    and waits for nothing.
    """
    for part in range(smem.shape[0]):
        plgpu.copy_smem_to_gmem(
            smem.at[part, pl.ds(0, target.shape[0])], target.at[:, pl.ds(part * COLUMNS, COLUMNS)]
        )


def rows_by_warp() -> Any:
    """Layout of [8 * n, COLUMNS * m]: each warp has two of eight rows, each thread two adjacent numbers."""
    return plgpu.Layout.TILED(Tiling(((4, COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def store_transposed(target: Any, values: jax.Array) -> None:
    """Writes values [ROWS, n] to shared memory [n, ROWS]."""
    if values.dtype == jnp.float32:  # no instruction transposes these
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    store(target.transpose((1, 0)), values)


def per_row(value: float, rows: int = ROWS, layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    """float32 [rows] filled with the value."""
    filled: jax.Array = plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), layout.reduce(1))
    return filled


def product(left: Any, right: Any, then: Callable[[], None] = lambda: None) -> jax.Array:
    """left [ROWS, n] @ right [n, columns] in float32, from shared memory; `then` runs while the tensor cores
    work.
    """

    def multiply(out: Any) -> Any:
        plgpu.wgmma(out, left, right)
        then()
        return out[...]

    result: jax.Array = pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((ROWS, right.shape[1]), jnp.float32)
    )
    return result


def accumulate(acc: jax.Array, left: Any, right: Any, then: Callable[[], None] = lambda: None) -> jax.Array:
    """acc [ROWS, n] + left @ right, in place if left is in registers; `then` as in `product`."""
    if not isinstance(left, jax.Array):
        return acc + product(left, right, then)

    def multiply(out: Any) -> None:
        plgpu.wgmma(out, left, right)
        then()

    total: jax.Array = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
    return total


def product_then_accumulate(
    left: Any,
    right: Any,
    acc: jax.Array,
    weights: Any,
    values: Any,
    then: Callable[[], None],
    use: Callable[[jax.Array], Any],
    like: Any,
) -> tuple[Any, jax.Array]:
    """use(left @ right) and acc + weights @ values. Both products are issued first, then `then` runs; the
    second runs during `use`.

    Args:
        like: a tree of arrays with the shapes and dtypes of the result of `use`.
    """

    def multiply(total: Any) -> Any:
        def both(out: Any) -> Any:
            plgpu.wgmma(out, left, right)
            plgpu.wgmma(total, weights, values)
            then()
            return use(plgpu.wgmma_accumulator_load(out, wait_n=1))

        return pl.run_scoped(both, plgpu.WGMMAAccumulatorRef((ROWS, right.shape[1]), jnp.float32))

    def added(total: Any) -> Any:
        used = multiply(total)
        return used, total[...]

    def in_place(refs: Any) -> None:
        total, cells = refs
        for cell, value in zip(jax.tree.leaves(cells), jax.tree.leaves(multiply(total)), strict=True):
            cell[...] = value

    if isinstance(weights, jax.Array):
        total, used = pl.run_state(in_place)((plgpu.WGMMAAccumulatorRef.init(acc), like))
        return used, total
    used, total = pl.run_scoped(added, plgpu.WGMMAAccumulatorRef((ROWS, values.shape[1]), jnp.float32))
    return used, acc + total
