"""Products with four-bit weights on Hopper: what registers hold, by their layouts, and the kernel,
interpreted with race detection.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.products.groups import Groups, grouped
from pallas_kernels.products.hopper.int4_product import grouped_int4_product, int4_product, splits_of
from pallas_kernels.products.hopper.int4_registers import STEP, WORD_LAYOUT, factor, numbers
from pallas_kernels.products.scales_in_registers import layout_of_scales
from pallas_kernels.quantization.int4 import E2M1, KINDS, SCALES, TILE, WORDS, Int4, pack, wide
from tests.kernels.interpreted import INTERPRETED, RACES, Runner, interpret, largest_error
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_becomes_its_number(kind: str, dtype: str) -> None:
    every = np.resize([*E2M1, *(-n for n in E2M1)] if kind == "e2m1" else np.arange(-8, 8), (64, TILE))
    words = pack(jnp.asarray(every, jnp.int8), jnp.ones((64, 4)), None, group=32, kind=kind).values
    got = numbers(words, range(4), kind, jnp.dtype(dtype), in_registers=False)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32) * factor(kind), every)
    some = numbers(words, range(1, 3), kind, jnp.dtype(dtype), in_registers=False)
    np.testing.assert_array_equal(np.asarray(some, np.float32) * factor(kind), every[:, 32:96])


# rows, outputs, inputs, group, offsets, kind, dtype; among them several blocks of rows, chunks that are not
# full, and split inputs
SMALL = [(9, 128, 640, 128, True, "int4", "bfloat16")]
MORE = [
    (3, 64, 96, 32, False, "e2m1", "bfloat16"),
    (33, 64, 1152, 32, True, "int4", "bfloat16"),
    (20, 64, 2304, 128, False, "int4", "float16"),
    (130, 128, 320, 64, True, "int4", "bfloat16"),
    (64, 192, 576, 64, False, "int4", "bfloat16"),
    (33, 64, 4160, 64, True, "int4", "float16"),
    (8, 64, 2048, 32, False, "e2m1", "float16"),
    (1, 384, 1280, 128, True, "e2m1", "bfloat16"),
]


def rounded(weight: Int4) -> np.ndarray[Any, Any]:
    """The values of int4 weights that the kernel scales before bfloat16 products, as it rounds them."""

    def each(of_groups: Any) -> np.ndarray[Any, Any]:
        return np.repeat(np.asarray(of_groups, np.float64), weight.group, -1)[..., : weight.size]

    def bfloat16(x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float64)

    numbers = np.asarray(wide(replace(weight, scale=jnp.ones_like(weight.scale), offset=None)), np.float64)
    scale = np.asarray(weight.scale)
    if weight.offset is None:
        return bfloat16(numbers * bfloat16(each(scale)))
    scale = scale + np.float32(2**-60)
    zero = bfloat16(8 - np.asarray(weight.offset, np.float64) / scale)  # as a number plus 8
    sixteenths = np.round(16 * zero) / 16
    return bfloat16(bfloat16(numbers + 8 - each(sixteenths)) * bfloat16(each(scale)))


def check(
    rows: int,
    outs: int,
    size: int,
    group: int,
    offset: bool,
    kind: str,
    dtype: str,
    *,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`."""
    weight, values = packed(outs, size, group, offset=offset, kind=kind)
    if (kind, dtype) == ("int4", "bfloat16") and runner is not INTERPRETED:
        values = rounded(weight)
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, size)), dtype)
    run = partial(int4_product, cores=8, dtype=jnp.float32, **runner.form(operand_in_registers=False))
    want = np.asarray(x, np.float64) @ values.T
    got = runner.run(run, x, weight)
    assert got.dtype == jnp.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    return largest_error(got, want)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_the_dequantized_weight(case: Any) -> None:
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_of_them(case: Any) -> None:
    check(*case)


def test_some_of_these_split_the_inputs_and_some_do_not() -> None:
    splits = [splits_of(*case[:3], 8) for case in (*SMALL, *MORE)]
    assert 1 in splits and max(splits) > 1
    assert (
        splits_of(8, 4096, 4096, 132) == 8
        and splits_of(8, 28672, 4096, 132) == 1
        and splits_of(4096, 4096, 4096, 132) == 1
    )


# rows of each group, outputs, inputs, group of scales, offsets, kind, dtype
GROUPED = [((3, 0, 9), 64, 160, 32, False, "e2m1", "bfloat16")]
MORE_GROUPED = [
    ((0, 70, 0, 1), 64, 640, 128, True, "int4", "bfloat16"),
    ((100, 1, 0, 0, 60), 384, 128, 64, False, "int4", "float16"),
    ((0, 0, 64), 192, 192, 32, True, "int4", "bfloat16"),
]


def check_grouped(
    sizes: tuple[int, ...],
    outs: int,
    size: int,
    group: int,
    offset: bool,
    kind: str,
    dtype: str,
    *,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`."""
    chosen = np.random.default_rng(outs).permutation(np.repeat(np.arange(len(sizes)), sizes))
    weight, values = packed(len(sizes) * outs, size, group, offset=offset, kind=kind)
    if (kind, dtype) == ("int4", "bfloat16") and runner is not INTERPRETED:
        values = rounded(weight)
    stacked = weight.map(lambda array: array.reshape(len(sizes), outs, -1))
    unused = jnp.asarray(np.array(sizes) == 0)[:, None, None]
    scale = jnp.where(unused, jnp.nan, stacked.scale)  # which nothing reads
    stacked = stacked.map(lambda array: scale if array is stacked.scale else array)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(len(chosen), size)), dtype)
    groups = grouped(jnp.asarray(chosen), len(sizes))
    form = runner.form(operand_in_registers=False)

    def run(x: jax.Array, weight: Int4, groups: Groups) -> jax.Array:
        return grouped_int4_product(x[groups.row], weight, groups, **form)[groups.place]

    got = np.asarray(runner.run(run, x, stacked, groups), np.float64)
    want = np.einsum("ri,roi->ro", np.asarray(x, np.float64), values.reshape(len(sizes), outs, size)[chosen])
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(dtype).eps), atol=1e-5 * np.abs(want).max())
    return largest_error(got, want)


@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_each_row_is_multiplied_by_the_weight_of_its_group(case: Any) -> None:
    check_grouped(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_GROUPED, ids=str)
def test_more_groups(case: Any) -> None:
    check_grouped(*case)


@pytest.mark.full
def test_a_row_is_the_same_alone_and_among_others() -> None:
    weight, _ = packed(64, 256, 64, offset=True)
    x = jax.random.normal(jax.random.key(0), (8, 256)).astype("bfloat16")
    run = partial(int4_product, cores=8, operand_in_registers=False, interpret=RACES)
    every, alone = interpret(run, x, weight), interpret(run, x[5:6], weight)
    np.testing.assert_array_equal(np.asarray(alone[0], np.float32), np.asarray(every[5], np.float32))
