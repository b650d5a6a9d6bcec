"""Where rows of groups are placed, and the Hopper kernel that multiplies them, interpreted on a CPU with race
detection on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.products.groups import BLOCK, GRID, Groups, block_rows, grouped, one_group, out_per_block
from pallas_kernels.products.hopper.grouped_product import grouped_product, splits_of
from pallas_kernels.quantization.quantized import GROUP, dequantize, quantize
from tests.kernels.interpreted import INTERPRETED, RACES, Runner, interpret, largest_error


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 3, 16]), st.sampled_from([1, 4, 40]), st.integers(0, 2**32), st.booleans())
def test_each_row_lies_once_in_a_block_of_its_group(count: int, rows: int, seed: int, few: bool) -> None:
    chosen = np.random.default_rng(seed).integers(0, min(2, count) if few else count, rows)
    groups, block = (
        jax.tree.map(np.asarray, jax.jit(grouped, static_argnums=1)(chosen, count)),
        block_rows(rows, count),
    )
    assert groups.block == block
    assert groups.row[groups.place].tolist() == list(range(rows))
    assert groups.owner[groups.place].tolist() == chosen.tolist()
    covered: dict[int, int] = {}
    for group, start, length in zip(groups.group, groups.start * GRID, groups.length * GRID, strict=True):
        assert (length <= block and start + block <= len(groups.row)) or not length, (
            "a whole block can be read"
        )
        covered |= dict.fromkeys(range(start, start + length), group)
    assert len(covered) == groups.length.sum() * GRID == groups.size.sum(), "no place twice"
    assert [covered[place] for place in groups.place] == chosen.tolist()
    assert (np.bincount(chosen, minlength=count) == 0).tolist() == (groups.size == 0).tolist(), (
        "nothing is read of other groups"
    )


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 3, 16]), st.sampled_from([1, 4, 40]), st.integers(0, 2**32))
def test_rows_of_groups_that_are_not_here_have_no_place(count: int, rows: int, seed: int) -> None:
    chosen = np.minimum(np.random.default_rng(seed).integers(0, 4 * count, rows), count)
    groups = jax.tree.map(np.asarray, jax.jit(grouped, static_argnums=(1, 2))(chosen, count, 4 * count))
    here = chosen < count
    assert groups.block == block_rows(rows, 4 * count)
    assert groups.row[groups.place[here]].tolist() == np.flatnonzero(here).tolist()
    assert (groups.place[~here] == len(groups.row)).all()
    assert groups.length.sum() * GRID == groups.size.sum() < here.sum() + GRID * count
    assert (np.bincount(chosen[here], minlength=count) == 0).tolist() == (groups.size == 0).tolist()


E4M3 = "float8_e4m3fn"
# kind, dtype, rows of each group, out, in
SMALL = [
    ("", "bfloat16", (3, 0, 5, 1), 128, 128),
    ("int8", "bfloat16", (0, 20, 0, 1), 64, 192),
]
MORE = [
    ("", "float16", (0, 20, 0, 1), 64, 320),
    (E4M3, "bfloat16", (3, 0, 5, 1), 128, 64),
    ("", "bfloat16", (100, 1, 0, 0, 60), 384, 128),
    ("int8", "float16", (9, 8, 0, 7, 1), 128, 512),
    (E4M3, "float16", (0, 0, 64), 192, 128),
]


def check(
    kind: str,
    dtype: str,
    sizes: Sequence[int],
    out: int,
    size: int,
    *,
    kernel: Callable[..., jax.Array] = grouped_product,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`.

    Args:
        kernel: this one or Blackwell's.
    """
    rng = np.random.default_rng(out)
    chosen = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = jnp.asarray(rng.normal(size=(len(chosen), size)), dtype)
    weight = jnp.asarray(rng.normal(size=(len(sizes), out, size)), dtype)
    stored = quantize(weight, kind) if kind else None
    values, scale = (stored.values, stored.scale) if stored else (weight, None)
    unused = np.array(sizes) == 0
    if not kind:
        values = jnp.where(unused[:, None, None], jnp.nan, values)
    groups = grouped(jnp.asarray(chosen), len(sizes))
    form = runner.form(operand_in_registers=False)

    def run(x: jax.Array, values: jax.Array, scale: jax.Array | None, groups: Groups) -> jax.Array:
        return kernel(x[groups.row], values, scale, groups, **form)[groups.place]

    got = np.asarray(runner.run(run, x, values, scale, groups), np.float32)
    matrices = np.asarray((dequantize(stored) if stored else weight).astype(jnp.float32))
    expected = np.einsum("ri,roi->ro", np.asarray(x, np.float32), matrices[chosen])
    np.testing.assert_allclose(got, expected, atol=1e-2 * np.abs(expected).max())
    return largest_error(got, expected)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_a_product_for_each_row(case: tuple[str, str, tuple[int, ...], int, int]) -> None:
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_of_them(case: tuple[str, str, tuple[int, ...], int, int]) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("rows", "block", "lengths"), [(1, 8, [1]), (20, 32, [3]), (130, 128, [16, 1]), (256, 128, [16, 16])]
)
def test_rows_of_one_group_stay_where_they_lie(rows: int, block: int, lengths: list[int]) -> None:
    groups, most = one_group(rows)
    assert most == block
    assert groups.length.tolist() == lengths and groups.start.tolist() == [
        16 * i for i in range(len(lengths))
    ]
    assert groups.place.tolist() == groups.row.tolist() == list(range(rows)) and not groups.group.any()


@pytest.mark.full
def test_a_dense_product_in_float32_is_one_of_a_single_group() -> None:
    rng = np.random.default_rng(0)
    x, stored = (
        jnp.asarray(rng.normal(size=(20, 192)), jnp.bfloat16),
        quantize(jnp.asarray(rng.normal(size=(64, 192)), jnp.bfloat16), "int8"),
    )
    groups, block = one_group(20)
    run = partial(
        grouped_product, block=block, dtype=jnp.float32, operand_in_registers=False, interpret=RACES
    )
    got = interpret(run, jnp.pad(x, ((0, 4), (0, 0))), stored.values[None], stored.scale[None], groups)[:20]
    want = (
        np.asarray(x, np.float64)
        @ (np.asarray(stored.values, np.float64) * np.asarray(stored.scale, np.float64)[:, None]).T
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def eight_bits(
    kind: str,
    rows: int,
    out: int,
    size: int,
    splits: int = 1,
    *,
    by_group: bool = False,
    least: int = BLOCK[0],
    kernel: Callable[..., jax.Array] = grouped_product,
    runner: Runner = INTERPRETED,
) -> float:
    """Both sides in eight bits; what no row is at is not read. Returns `largest_error`.

    Args:
        least: rows of a block.
    """
    rng = np.random.default_rng(rows)
    sizes = np.repeat(np.arange(1, -(-size // GROUP) + 1), GROUP)[:size]  # of each group of numbers
    x, weight = (
        quantize(jnp.asarray(rng.normal(size=shape) * factors, jnp.float32), kind, by_group=by_group)
        for shape, factors in (((rows, size), sizes), ((out, size), sizes[::-1] ** 2))
    )
    groups, block = one_group(rows, least)
    more = -rows % block
    values = jnp.pad(x.values, ((0, more), (0, 0)))
    ends: Any = (*by_group * [(0, 0)], (0, more))
    scale = jnp.pad(x.scale.T, ends, constant_values=jnp.nan)
    form = {"block": block, "dtype": jnp.float32, "splits": splits, **runner.form()}

    def run(x: jax.Array, values: jax.Array, scale: jax.Array, x_scale: jax.Array) -> jax.Array:
        return kernel(x, values[None], scale[None], groups, x_scale=x_scale, **form)[:rows]

    got = np.asarray(runner.run(run, values, weight.values, weight.scale, scale))
    want = np.asarray(dequantize(x), np.float64) @ np.asarray(dequantize(weight), np.float64).T
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    return largest_error(got, want)


@pytest.mark.parametrize(
    "case",
    [
        (E4M3, 5, 64, 256),
        ("int8", 9, 64, 512, 2),
        pytest.param(("int8", 20, 128, 192), marks=pytest.mark.full),
    ],
)
def test_both_sides_in_eight_bits(case: tuple[str, int, int, int]) -> None:
    eight_bits(*case)


@pytest.mark.parametrize(
    "case", [(E4M3, 9, 64, 512, 2), pytest.param((E4M3, 40, 128, 384), marks=pytest.mark.full)]
)
def test_both_sides_scaled_by_group(case: tuple[str, int, int, int]) -> None:
    eight_bits(*case, by_group=True)


def inputs_split(
    kind: str,
    rows: int,
    out: int,
    size: int,
    splits: int,
    *,
    dtype: str = "bfloat16",
    kernel: Callable[..., jax.Array] = grouped_product,
    runner: Runner = INTERPRETED,
) -> float:
    """Rows of 16 bits by weights of eight, whose inputs several blocks share; see `largest_error`."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, size)), dtype)
    weight = quantize(jnp.asarray(rng.normal(size=(out, size)), jnp.float32), kind)
    groups, block = one_group(rows)
    form = {
        "block": block,
        "dtype": jnp.float32,
        "splits": splits,
        **runner.form(operand_in_registers=False),
    }

    def run(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, -rows % GRID), (0, 0)))
        return kernel(x, values[None], scale[None], groups, **form)[:rows]

    got = np.asarray(runner.run(run, x, weight.values, weight.scale))
    want = np.asarray(x, np.float64) @ np.asarray(dequantize(weight), np.float64).T
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    return largest_error(got, want)


@pytest.mark.parametrize(
    "case",
    [("int8", 3, 64, 256, 4), pytest.param((E4M3, 20, 128, 384, 3), marks=pytest.mark.full)],
)
def test_blocks_share_the_inputs(case: tuple[str, int, int, int, int]) -> None:
    inputs_split(*case)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 300), st.sampled_from(["bfloat16", "int8"]))
def test_blocks_that_share_inputs_fill_the_device_and_move_little(
    rows: int, outs: int, steps: int, x: str
) -> None:
    out, size = 64 * outs, 64 * steps
    splits = splits_of(rows, jax.ShapeDtypeStruct((out, size), jnp.int8), x, 132)  # type: ignore[arg-type]
    stages = size // (128 if (x == "int8" or rows <= 64) and steps % 2 == 0 else 64)
    assert splits >= 1 and stages % splits == 0
    if splits > 1:
        assert stages // splits >= 8
        assert 8 * rows * out * splits <= out * size / 2, "partial sums"
        blocks = -(-rows // 128)
        assert blocks * (out // out_per_block(blocks, out)) * splits <= 2 * 132


def test_a_layers_products_are_split_where_they_have_few_outputs() -> None:
    shapes = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
    found = {
        rows: [
            splits_of(rows, jax.ShapeDtypeStruct(shape, jnp.int8), "bfloat16", 132)  # type: ignore[arg-type]
            for shape in shapes.values()
        ]
        for rows in (1, 32, 256)
    }
    assert found == {1: [2, 4, 1, 4], 32: [2, 4, 1, 4], 256: [1, 1, 1, 2]}


def scaled_by_group(
    sizes: tuple[int, ...],
    splits: int = 1,
    *,
    inputs: bool = False,
    out: int = 64,
    size: int = 256,
    kernel: Callable[..., jax.Array] = grouped_product,
    runner: Runner = INTERPRETED,
) -> float:
    """The largest error, see `largest_error`.

    Args:
        inputs: whether rows are quantized too.
    """
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
    x, weight = (
        jnp.asarray(rng.normal(size=(len(chosen), size)), jnp.bfloat16),
        rng.normal(size=(len(sizes), out, size)) * np.repeat([1, 30] * (size // GROUP // 2), GROUP),
    )
    stored = quantize(jnp.asarray(weight, jnp.float32), E4M3, by_group=True)
    rows = quantize(x.astype(jnp.float32), E4M3, by_group=True) if inputs else None
    groups = grouped(chosen, len(sizes))
    form = {"dtype": jnp.float32, "splits": splits, **runner.form(operand_in_registers=False)}

    def run(x: jax.Array, x_scale: Any, values: jax.Array, scale: jax.Array, groups: Groups) -> jax.Array:
        scales = {} if x_scale is None else {"x_scale": x_scale[groups.row].T}
        return kernel(x[groups.row], values, scale, groups, **scales, **form)[groups.place]

    given = (x, None) if rows is None else (rows.values, rows.scale)
    got = np.asarray(runner.run(run, *given, stored.values, stored.scale, groups))
    real = np.asarray(x if rows is None else dequantize(rows), np.float64)
    want = np.einsum("ri,roi->ro", real, np.asarray(dequantize(stored), np.float64)[chosen])
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    return largest_error(got, want)


@pytest.mark.parametrize(
    ("sizes", "splits"), [((0, 3), 2), pytest.param((20, 0, 9), 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("inputs", [False, True])
def test_scales_by_group_of_inputs(sizes: tuple[int, ...], splits: int, inputs: bool) -> None:
    scaled_by_group(sizes, splits, inputs=inputs)


def test_few_outputs_make_small_blocks() -> None:
    assert [out_per_block(1, out) for out in (4096, 14336, 28672, 192 * 132)] == [64, 64, 128, 128]
    assert [out_per_block(blocks, 4096) for blocks in (4, 5)] == [64, 128] and out_per_block(200, 192) == 64
