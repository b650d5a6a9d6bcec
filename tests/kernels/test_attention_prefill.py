"""The Hopper kernel for prefill attention against float64, interpreted on a CPU with race
detection on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.hopper.prefill import paged_attention_prefill
from tests.kernels import reference
from tests.kernels.interpreted import INTERPRETED, Runner, cache, largest_error, only_what_is_seen, options_of
from tests.kernels.test_attention_decode import eight_bits

Ways = dict[str, Any]
PLAIN: Ways = {"scale": 0.2}
WINDOW: Ways = {"scale": 0.3, "window": 70}
# the last tile's last query lacks one key of a block; all keys weigh about as much
LONG: Ways = {"scale": 0.02, "window": 235}
CAP: Ways = {"scale": 0.5, "soft_cap": 3.0}
BOTH: Ways = {"scale": 0.3, "window": 33, "soft_cap": 20.0}
SINKS: Ways = {"scale": 0.3, "window": 70, "sinks": True}

# head_dim, kv_heads, group, page_size, tile, dtype, ways
SMALL = [
    (128, 1, 2, 64, 64, "bfloat16", PLAIN),
    (64, 1, 3, 16, 64, "bfloat16", SINKS),
    pytest.param(64, 1, 3, 16, 64, "bfloat16", WINDOW, marks=pytest.mark.full),
    (64, 2, 1, 32, 64, "float16", LONG),
    (256, 1, 5, 64, 16, "bfloat16", BOTH),
    pytest.param(64, 1, 3, 32, 48, "bfloat16", SINKS, marks=pytest.mark.full),
    pytest.param(128, 2, 1, 64, 64, "bfloat16", SINKS, marks=pytest.mark.full),
    pytest.param(64, 1, 1, 128, 128, "float16", BOTH, marks=pytest.mark.full),
]
EIGHT_BITS = [
    (64, "bfloat16", WINDOW, "float8_e4m3fn"),
    pytest.param(64, "bfloat16", BOTH, "float8_e4m3fn", marks=pytest.mark.full),
    pytest.param(128, "float16", WINDOW, "int8", marks=pytest.mark.full),
]


def tiles(tile: int, page_size: int) -> tuple[list[int], list[int]]:
    """First positions and lengths: a first tile, whole; a chunk from mid-page, ending mid-page; padding; one
    token; a later tile, whose first query lacks one key of a block; another, which shares that one's first
    page.
    """
    return [0, page_size // 2 + 3, 0, page_size, 0, 126, 300 - tile], [tile, tile - 5, 0, 1, 1, tile, tile]


def check(
    head_dim: int,
    kv_heads: int,
    group: int,
    page_size: int,
    tile: int,
    dtype: str,
    ways: Ways,
    kind: str | None = None,
    *,
    blocks: int | None = 3,
    runner: Runner = INTERPRETED,
    further: int | None = None,
    kernel: Callable[..., jax.Array] = paged_attention_prefill,
) -> float:
    """The largest error, see `largest_error`.

    Args:
        further: from the fourth query on, all see this many tokens behind the last; None: they see none.
    """
    positions, lengths = tiles(tile, page_size)
    ends, until = [position + length for position, length in zip(positions, lengths, strict=True)], None
    if further is not None:
        at = np.array(positions)[:, None] + np.arange(tile)
        ends = [end + further * (length > 3) for end, length in zip(ends, lengths, strict=True)]
        last = np.where(np.arange(tile) < 3, at, np.maximum(at, np.array(ends)[:, None] - 1))
        until = jnp.asarray(last, jnp.int32)
    whole = cache(ends, -(-max(ends) // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    paged = only_what_is_seen(whole, positions, ends, ways.get("window"), behind=0)
    clean = paged.clean()
    if kind is not None:  # scales of what is not seen are NaN, and so are fp8 numbers
        (whole, _), (paged, clean) = eight_bits(whole, kind), eight_bits(paged, kind)
    q = jnp.asarray(
        np.random.default_rng(7).normal(size=(len(ends), tile, kv_heads * group, head_dim)), dtype
    )
    options = options_of(ways, kv_heads * group)
    stages = None if head_dim == 256 else 2  # few in any case, so that they are used again
    form: Ways = {"stages": stages, "blocks": blocks, "until": until} | runner.form(
        operand_in_registers=False
    )
    run = jax.jit(partial(kernel, options=options, **form))
    where = jnp.asarray(positions), jnp.asarray(lengths)
    got = np.asarray(runner.run(run, q, *paged[:3], *where), np.float32)
    # neither what is behind the first query's window nor the blocks that items fall to change a bit
    if ways is BOTH:
        run = jax.jit(partial(kernel, options=options, **form | {"blocks": 2}))
        np.testing.assert_array_equal(got, np.asarray(runner.run(run, q, *whole[:3], *where), np.float32))
    want = reference.paged_attention_prefill(q, *clean[:3], *where, options, until=until)
    # What is rounded to dtype: each weight, and the result. Anything else is float32.
    rounding = float(jnp.finfo(dtype).eps) / 2
    allowed = 1.05 * rounding * (np.abs(want) + float(jnp.abs(clean.v).max())) + 1e-5
    real = np.arange(tile) < np.array(lengths)[:, None]
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= allowed)[real].all()
    return largest_error(got[real], want[real])


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "page_size", "tile", "dtype", "ways"), SMALL)
def test_the_reference_is_met(
    head_dim: int, kv_heads: int, group: int, page_size: int, tile: int, dtype: str, ways: Ways
) -> None:
    check(head_dim, kv_heads, group, page_size, tile, dtype, ways)


@pytest.mark.parametrize(
    ("head_dim", "group", "ways"), [(64, 3, BOTH), pytest.param(256, 2, PLAIN, marks=pytest.mark.full)]
)
def test_the_reference_is_met_if_queries_see_later_tokens(head_dim: int, group: int, ways: Ways) -> None:
    check(head_dim, 1, group, 16, 48, "bfloat16", ways, further=37)


@pytest.mark.parametrize(("head_dim", "dtype", "ways", "kind"), EIGHT_BITS)
def test_the_reference_is_met_with_eight_bits(head_dim: int, dtype: str, ways: Ways, kind: str) -> None:
    check(head_dim, 1, 2, 32, 64, dtype, ways, kind)


GROUPS_AND_TILES = [(1, 128), (2, 64), (3, 48), (9, 16)]
SHAPES = [
    *itertools.product((64, 128, 256), GROUPS_AND_TILES, (16, 64, 192), (PLAIN, WINDOW, LONG, CAP, BOTH))
]
DTYPES_AND_KINDS = [
    ("bfloat16", None),
    ("float16", None),
    ("bfloat16", "int8"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", None),
]
# Of the last there are five, so that every shape meets others.


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    head_dim, (group, tile), page_size, ways = SHAPES[index]
    dtype, kind = DTYPES_AND_KINDS[index % len(DTYPES_AND_KINDS)]
    check(head_dim, 1, group, page_size, tile, dtype, ways, kind)
