"""The Hopper kernel for decode attention against float64, interpreted on a CPU with race
detection on.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_facts import CASES

from pallas_kernels import targets
from pallas_kernels.attention.hopper.decode import paged_attention_decode
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.work_list import WorkList, even_work, fixed_work, most_rows
from pallas_kernels.quantization.quantized import dequantize, movable, quantize
from tests.kernels import reference
from tests.kernels.interpreted import (
    INTERPRETED,
    RACES,
    Cache,
    Runner,
    cache,
    interpret,
    largest_error,
    more_scales,
    only_what_is_seen,
    options_of,
)
from tests.kernels.semaphores_model import at_once

Ways = dict[str, Any]
PLAIN: Ways = {"scale": 0.2}
WINDOW: Ways = {"scale": 0.3, "window": 70}
CAP: Ways = {"scale": 0.5, "soft_cap": 3.0}
BOTH: Ways = {"scale": 0.3, "window": 33, "soft_cap": 20.0}
SINKS: Ways = {"scale": 0.3, "window": 70, "sinks": True}

# head_dim, kv_heads, group, page_size, blocks of threads (negative: with cuts at fixed places), dtype, ways
SMALL = [
    pytest.param(128, 2, 4, 64, 6, "bfloat16", PLAIN, marks=pytest.mark.full),
    (128, 1, 8, 64, 3, "bfloat16", BOTH),
    pytest.param(64, 1, 1, 16, 2, "float16", WINDOW, marks=pytest.mark.full),
    (64, 2, 4, 32, -4, "bfloat16", CAP),
    pytest.param(256, 1, 4, 64, 2, "float16", CAP, marks=pytest.mark.full),
    (256, 1, 9, 16, 1, "float16", WINDOW),
    pytest.param(256, 1, 9, 16, 1, "bfloat16", WINDOW, marks=pytest.mark.full),
    (64, 1, 8, 128, 8, "bfloat16", SINKS),
    pytest.param(64, 1, 8, 128, 4, "bfloat16", BOTH, marks=pytest.mark.full),
    pytest.param(64, 2, 4, 16, -1, "bfloat16", SINKS, marks=pytest.mark.full),
]


def check(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    blocks: int,
    dtype: str,
    ways: Ways,
    kind: str | None = None,
    *,
    longest: int = 700,
    counts: tuple[int, ...] = (1,) * 7,
    alone: bool = False,
    runner: Runner = INTERPRETED,
) -> float:
    """What no query sees is NaN: numbers, or an eight-bit kind's scales and, in fp8, numbers.

    Args:
        longest: tokens of a row; so many that it is cut.
        counts: number of rows of each sequence.
        alone: each row has the same bits in a group of its own. So it is with fixed cuts.

    Returns:
        The largest error, see `largest_error`.
    """
    lengths = [1, page_size - 1, 0, page_size, page_size + 1, longest, 129][: len(counts)]
    whole = cache(lengths, -(-longest // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    oldest = np.array(lengths) - counts
    paged = only_what_is_seen(whole, oldest, lengths, ways.get("window"), behind=0)
    whole, paged = of_rows(whole, counts), of_rows(paged, counts)
    clean = paged.clean()
    if kind:
        (whole, _), (paged, clean) = eight_bits(whole, kind), eight_bits(paged, kind)
    rows = sum(counts)
    q = jnp.asarray(np.random.default_rng(7).normal(size=(rows, kv_heads * group, head_dim)), dtype)
    options = options_of(ways, kv_heads * group)
    how: Ways = {"kv_heads": kv_heads, "blocks": abs(blocks), "window": ways.get("window")}
    divide = (
        partial(even_work, **how)
        if blocks > 0
        else partial(fixed_work, tokens=paged.tables.shape[1] * page_size, **how)
    )
    owners = jnp.asarray(np.repeat(np.arange(len(counts)), counts), jnp.int32)
    work = jax.jit(partial(divide, owners=owners, most_rows=most_rows(group, rows)))(paged.lengths)
    attend = partial(paged_attention_decode, options=options, **runner.form(operand_in_registers=False))
    run = jax.jit(partial(attend, work=work))
    got = np.asarray(runner.run(run, q, *paged), np.float32)
    if ways is WINDOW:  # what is behind it changes no bit
        np.testing.assert_array_equal(got, np.asarray(runner.run(run, q, *whole), np.float32))
    if alone:
        run = jax.jit(partial(attend, work=jax.jit(divide)(paged.lengths)))
        np.testing.assert_array_equal(got, np.asarray(runner.run(run, q, *paged), np.float32))
    want = reference.paged_attention_decode(q, *clean, options)
    # What is rounded to dtype: each weight, and the result. Anything else is float32.
    rounding = float(jnp.finfo(dtype).eps) / 2
    allowed = 1.05 * rounding * (np.abs(want) + float(jnp.abs(clean.v).max())) + 1e-5
    assert (np.abs(got - want) <= allowed).all()  # false where got is NaN
    assert (got[np.asarray(paged.lengths) == 0] == 0).all()
    return largest_error(got, want)


def of_rows(sequences: Cache, counts: tuple[int, ...]) -> Cache:
    """The same pages for several rows of each sequence, the last of which sees all of its tokens."""
    behind = np.concatenate([np.arange(count)[::-1] for count in counts])
    lengths, tables = (
        np.repeat(np.asarray(x), counts, axis=0) for x in (sequences.lengths, sequences.tables)
    )
    return sequences._replace(
        tables=jnp.asarray(tables, jnp.int32), lengths=jnp.asarray(np.maximum(lengths - behind, 0), jnp.int32)
    )


def eight_bits(paged: Cache, kind: str) -> tuple[Any, Cache]:
    """The cache as stored, with more scales than are used, and its values in float32, with zeros instead of
    NaN.
    """
    k, v = (movable(quantize(pages, kind)) for pages in paged[:2])
    numbers = (dequantize(replace(pages, dtype="float32")) for pages in (k, v))
    return paged._replace(k=more_scales(k), v=more_scales(v)), paged._replace(
        k=next(numbers), v=next(numbers)
    ).clean()


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "page_size", "blocks", "dtype", "ways"), SMALL)
def test_the_reference_is_met(
    head_dim: int, kv_heads: int, group: int, page_size: int, blocks: int, dtype: str, ways: Ways
) -> None:
    check(head_dim, kv_heads, group, page_size, blocks, dtype, ways)


# head_dim, kv_heads, group, page_size, blocks, dtype, ways, kind, longest, rows of the sequences
TOGETHER = [
    (64, 1, 4, 64, 3, "bfloat16", SINKS, None, 330, (1, 2, 1, 1, 1, 3, 9)),
    # fixed cuts, one of them between rows of a sequence
    (64, 1, 7, 32, -4, "bfloat16", SINKS, None, 258, (1, 1, 1, 1, 1, 5, 2)),
    (64, 1, 4, 16, 5, "bfloat16", BOTH, "int8", 330, (1, 8, 1, 1, 1, 2, 1)),
    *(
        pytest.param(*shape, longest, (1, 2, 1, 3, 5, 8, 9), marks=pytest.mark.full)
        for longest in (258, 700)
        for shape in (
            (128, 2, 4, 64, 6, "bfloat16", PLAIN, None),
            (128, 1, 8, 16, -3, "bfloat16", SINKS, None),
            (64, 2, 1, 32, 5, "float16", CAP, None),
            (64, 1, 12, 64, -4, "bfloat16", BOTH, None),
            (256, 1, 7, 128, 3, "bfloat16", WINDOW, None),
            (64, 1, 32, 64, 4, "bfloat16", CAP, None),
            (64, 1, 40, 64, -2, "bfloat16", PLAIN, None),
            (128, 1, 4, 64, -4, "bfloat16", WINDOW, "float8_e4m3fn"),
            (256, 1, 4, 16, 5, "float16", SINKS, "int8"),
        )
    ),
]


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group", "page_size", "blocks", "dtype", "ways", "kind", "longest", "counts"),
    TOGETHER,
)
def test_rows_of_a_sequence_read_its_pages_together(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    blocks: int,
    dtype: str,
    ways: Ways,
    kind: str | None,
    longest: int,
    counts: tuple[int, ...],
) -> None:
    how: Ways = {"longest": longest, "counts": counts, "alone": blocks < 0}
    check(head_dim, kv_heads, group, page_size, blocks, dtype, ways, kind, **how)


@pytest.mark.parametrize(
    "blocks", [4, pytest.param(-4, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_blocks_that_run_at_the_same_time_join_parts_without_races(blocks: int) -> None:
    with at_once():
        check(64, 1, 4, 64, blocks, "bfloat16", SINKS)


@pytest.mark.full
def test_blocks_of_one_pair_of_warpgroups_join_parts_without_races() -> None:
    with at_once():
        check(256, 1, 9, 64, 3, "bfloat16", PLAIN)


def test_layers_share_semaphores() -> None:
    """Each call leaves them at zero, which `interpret` checks as well."""
    paged = cache([300, 200], 5, 1, 64, 64, "bfloat16", seed=1)
    q = jax.random.normal(jax.random.key(7), (2, 4, 64), jnp.bfloat16)

    def layer(q: jax.Array, work: WorkList) -> jax.Array:
        return paged_attention_decode(
            q, *paged, AttentionOptions(0.2), work=work, operand_in_registers=False, interpret=RACES
        )

    @jax.jit
    def layers(q: jax.Array) -> jax.Array:
        work = even_work(paged.lengths, 1, blocks=3).shared()
        return jnp.stack([layer(x, work) for x in (q, 2 * q)])

    alone = jax.jit(lambda q: layer(q, even_work(paged.lengths, 1, blocks=3)))
    np.testing.assert_array_equal(
        np.asarray(interpret(layers, q), np.float32),
        np.asarray([interpret(alone, x) for x in (q, 2 * q)], np.float32),
    )


EIGHT_BITS = [
    ("int8", 128, 1, 4, 64, 3, "bfloat16", PLAIN),
    ("float8_e4m3fn", 64, 2, 4, 16, 4, "bfloat16", BOTH),
    pytest.param("float8_e4m3fn", 256, 1, 8, 32, 2, "float16", WINDOW, marks=pytest.mark.full),
]


@pytest.mark.parametrize(
    ("kind", "head_dim", "kv_heads", "group", "page_size", "blocks", "dtype", "ways"), EIGHT_BITS
)
def test_the_reference_is_met_with_eight_bit_caches(
    kind: str, head_dim: int, kv_heads: int, group: int, page_size: int, blocks: int, dtype: str, ways: Ways
) -> None:
    check(head_dim, kv_heads, group, page_size, blocks, dtype, ways, kind)


SHAPES = [*itertools.product((64, 128, 256), (1, 4, 8), (16, 64, 128), (PLAIN, WINDOW, CAP, BOTH))]
# five: every shape meets others
BLOCKS_AND_DTYPES = [(1, "bfloat16"), (4, "float16"), (7, "bfloat16"), (-4, "float16"), (6, "bfloat16")]


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    head_dim, group, page_size, ways = SHAPES[index]
    check(head_dim, 2, group, page_size, *BLOCKS_AND_DTYPES[index % len(BLOCKS_AND_DTYPES)], ways)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("index", range(0, len(SHAPES), 3))
def test_the_reference_is_met_everywhere_with_eight_bit_caches(index: int, kind: str) -> None:
    head_dim, group, page_size, ways = SHAPES[index + (kind == "int8")]
    check(head_dim, 2, group, page_size, *BLOCKS_AND_DTYPES[index % len(BLOCKS_AND_DTYPES)], ways, kind)


def test_what_is_beside_a_row_changes_no_bit_where_cuts_are_fixed() -> None:
    """With other rows around it, its tiles lie in other blocks; with even work it is cut elsewhere."""
    lengths = [700, 70, 400]
    paged = cache(lengths, 768 // 64, 1, 64, 64, "bfloat16", seed=3)
    q = jax.random.normal(jax.random.key(7), (3, 4, 64), jnp.bfloat16)
    alone = jnp.asarray([700, 0, 0], jnp.int32)
    run = jax.jit(
        partial(
            paged_attention_decode, options=AttentionOptions(0.3), operand_in_registers=False, interpret=RACES
        )
    )

    def first_row(make: Any, seen: jax.Array) -> np.ndarray:
        return np.asarray(interpret(run, q, *paged[:3], seen, work=make(seen)), np.float32)[0]

    fixed, even = (
        jax.jit(partial(fixed_work, kv_heads=1, blocks=5, tokens=768)),
        jax.jit(partial(even_work, kv_heads=1, blocks=5)),
    )
    assert not np.array_equal(even(paged.lengths).items[0], even(alone).items[0])
    np.testing.assert_array_equal(first_row(fixed, paged.lengths), first_row(fixed, alone))


def test_the_grid_does_not_depend_on_the_row_bucket() -> None:
    few, many = (
        str(jax.make_jaxpr(function)(*args))
        for function, args in (CASES["head dim 128"], CASES["head dim 128, 256 rows"])
    )
    grids = re.findall(r"\bgrid=(\(.*?\))", few)
    assert grids == [f"({targets.CORES},)"]  # two pairs of warpgroups a block
    assert grids == re.findall(r"\bgrid=(\(.*?\))", many)
