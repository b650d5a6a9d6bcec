"""Products with four-bit weights on Hopper: what registers hold, by their layouts, and checks of the kernel,
whose cases are in `shipped`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.products.groups import Groups, grouped
from pallas_kernels.products.hopper.int4_product import (
    STEP,
    WORD_LAYOUT,
    grouped_int4_product,
    int4_product,
    splits_of,
)
from pallas_kernels.products.scales_in_registers import layout_of_scales
from pallas_kernels.quantization.int4 import SCALES, TILE, WORDS, Int4, wide
from tests.kernels.executed import FEW, Executed
from tests.kernels.interpreted import Runner, largest_error
from tests.kernels.test_int4 import packed


def held(layout: mgpu.TiledLayout, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Flat indices of the numbers that each thread of a warpgroup holds, [128, registers, numbers of a
    register].
    """
    tiled = layout.tiling.tile_shape(shape)
    order = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:  # each splits the last axes
        split = order.shape[: -len(tile)] + sum(
            ((n // t, t) for n, t in zip(order.shape[-len(tile) :], tile, strict=True)), ()
        )
        axes = [
            *range(order.ndim - len(tile)),
            *range(order.ndim - len(tile), len(split), 2),
            *range(order.ndim - len(tile) + 1, len(split), 2),
        ]
        order = order.reshape(split).transpose(axes)
    assert order.shape == tiled
    warp, lanes = layout.warp_dims, [dim for dim in layout.lane_dims if isinstance(dim, int)]
    first = [*warp, *lanes]
    moved = np.moveaxis(order, first, range(len(first)))
    vector = order.shape[layout.vector_dim]
    moved = moved.reshape(
        4, -1, order.size // (4 * np.prod([order.shape[dim] for dim in lanes]) * vector), vector
    )
    return np.repeat(moved, 32 // moved.shape[1], axis=1).reshape(128, -1, vector)


def test_each_thread_finds_its_pairs_in_the_words_that_it_loads() -> None:
    """Register i of nibble k's quarter has the inputs that word i has there, in order."""
    words, columns = held(WORD_LAYOUT.to_mgpu(), (64, WORDS)), held(mgpu.WGMMA_LAYOUT, (64, TILE))
    row, word = np.divmod(words[..., 0], WORDS)  # [128, 8]
    for nibble in range(4):
        first = STEP * nibble + 2 * word
        # the inputs that these bits are, by int4.py
        want = np.stack([row * TILE + first, row * TILE + first + 1], -1)
        # Registers are ordered by column block, then row half: those of a quarter follow each other.
        np.testing.assert_array_equal(columns[:, 8 * nibble : 8 * nibble + 8], want)


def test_scales_are_held_where_rows_of_sums_are() -> None:
    scales, sums = held(layout_of_scales(SCALES).to_mgpu(), (64, SCALES)), held(mgpu.WGMMA_LAYOUT, (64, 8))
    np.testing.assert_array_equal(scales[..., 0] // SCALES, sums[..., 0] // 8)
    np.testing.assert_array_equal(scales % SCALES, np.broadcast_to(np.arange(SCALES), scales.shape))


def rounded(weight: Int4, dtype: str) -> np.ndarray[Any, Any]:
    """The values of int4 weights as the kernel rounds them to x's dtype."""

    def each(of_groups: Any) -> np.ndarray[Any, Any]:
        return np.repeat(np.asarray(of_groups, np.float64), weight.group, -1)[..., : weight.size]

    def half(x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x, np.float32).astype(dtype).astype(np.float64)

    plain = replace(weight, scale=jnp.ones_like(weight.scale), offset=None)
    numbers, scale = np.asarray(wide(plain), np.float64), np.asarray(weight.scale)
    if weight.offset is None:
        return half(numbers * half(each(scale)))
    offset = np.asarray(weight.offset)
    if dtype == "float16":
        return half((numbers + 8) * half(each(scale)) + half(each(offset - 8 * scale)))
    positive = scale + np.float32(2**-60)
    zero = np.round(16 * half(8 - offset.astype(np.float64) / positive)) / 16  # in units of subnormal numbers
    return half(half(numbers + 8 - each(zero)) * half(each(positive)))


def check(
    rows: int,
    outs: int,
    size: int,
    group: int,
    offset: bool,
    kind: str,
    dtype: str,
    *,
    runner: Runner,
) -> float:
    """The largest error, see `largest_error`."""
    weight, values = packed(outs, size, group, offset=offset, kind=kind)
    if kind == "int4":
        values = rounded(weight, dtype)
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, size)), dtype)
    run = partial(int4_product, cores=8, dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ values.T
    got = runner.run(run, x, weight)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    return largest_error(got, want)


def test_products_with_few_outputs_split_their_inputs() -> None:
    assert splits_of(3, 64, 4096, 8) > 1 and splits_of(9, 128, 640, 8) == 1
    assert (
        splits_of(8, 4096, 4096, 132) == 8
        and splits_of(8, 28672, 4096, 132) == 1
        and splits_of(4096, 4096, 4096, 132) == 1
    )


def check_grouped(
    sizes: tuple[int, ...],
    outs: int,
    size: int,
    group: int,
    offset: bool,
    kind: str,
    dtype: str,
    *,
    runner: Runner,
) -> float:
    """The largest error, see `largest_error`."""
    chosen = np.random.default_rng(outs).permutation(np.repeat(np.arange(len(sizes)), sizes))
    weight, values = packed(len(sizes) * outs, size, group, offset=offset, kind=kind)
    if kind == "int4":
        values = rounded(weight, dtype)
    stacked = weight.map(lambda array: array.reshape(len(sizes), outs, -1))
    unused = jnp.asarray(np.array(sizes) == 0)[:, None, None]
    scale = jnp.where(unused, jnp.nan, stacked.scale)  # which nothing reads
    stacked = stacked.map(lambda array: scale if array is stacked.scale else array)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(len(chosen), size)), dtype)
    groups = grouped(jnp.asarray(chosen), len(sizes))

    def run(x: jax.Array, weight: Int4, groups: Groups) -> jax.Array:
        return grouped_int4_product(x[groups.row], weight, groups)[groups.place]

    got = np.asarray(runner.run(run, x, stacked, groups), np.float64)
    want = np.einsum("ri,roi->ro", np.asarray(x, np.float64), values.reshape(len(sizes), outs, size)[chosen])
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(dtype).eps), atol=1e-5 * np.abs(want).max())
    return largest_error(got, want)


def test_a_row_is_the_same_alone_and_among_others() -> None:
    weight, _ = packed(64, 256, 64, offset=True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 256)), jnp.bfloat16)
    run = partial(int4_product, cores=8)
    every, alone = (Executed(FEW[:1]).runner.run(run, rows, weight) for rows in (x, x[5:6]))
    np.testing.assert_array_equal(np.asarray(alone[0], np.float32), np.asarray(every[5], np.float32))
