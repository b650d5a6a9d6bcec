"""The Hopper kernel that writes keys and values against the reference, interpreted on a CPU with race detection on."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.kv_write import BLOCK_BYTES, heads_per_block, kv_write
from pallas_kernels.quantized import Pages, Quantized, dequantize, movable, quantize
from tests.kernels.interpreted import RACES, interpret

NUM_PAGES = 7

# cache, dtype, head_dim, kv_heads, page_size, tokens, pairs
SMALL = [
    (None, "bfloat16", 128, 2, 16, 13, 64),
    (None, "float16", 64, 1, 64, 5, 0),
    (None, "bfloat16", 64, 3, 32, 8, 24),
    ("int8", "bfloat16", 128, 1, 16, 9, 32),
    ("float8_e4m3fn", "bfloat16", 256, 1, 32, 3, 128),
]


def check(kind: str | None, dtype: str, head_dim: int, kv_heads: int, page_size: int, tokens: int, pairs: int) -> None:
    rng = np.random.default_rng(tokens)
    places = rng.permutation(np.arange(page_size, NUM_PAGES * page_size))[:tokens]
    real = np.arange(tokens) % 3 != 1
    places[~real] %= page_size  # padding, in the null page
    k, v = (np.where(real[:, None, None], rng.normal(size=(tokens, kv_heads, head_dim)), np.nan) for _ in "kv")
    k[0] = 0
    angles = rng.uniform(-3, 3, size=(tokens, pairs))
    rotation = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)) if pairs else None
    nothing: Pages = jnp.full((NUM_PAGES, kv_heads, page_size, head_dim), jnp.nan, dtype)
    old = movable(quantize(nothing, kind)) if kind else nothing  # NaN scales
    at = places // page_size, places % page_size
    args: Any = (old, old, jnp.asarray(k, dtype), jnp.asarray(v, dtype), *(jnp.asarray(x, jnp.int32) for x in at))
    run = jax.jit(partial(kv_write, interpret=RACES))
    got = interpret(run, *args, rotation=rotation)
    written = at[0][real], slice(None), at[1][real]
    for new, want in zip(got, reference.kv_write(*args, rotation=rotation), strict=True):
        compare(numbers_at(new, written), numbers_at(want, written), kind or dtype, exact=rotation is None and kind is None)
        untouched = np.ones((NUM_PAGES, page_size), bool)
        untouched[at[0][real], at[1][real]] = False
        for now, before in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
            np.testing.assert_array_equal(*(np.asarray(x, np.float32).swapaxes(1, 2)[untouched] for x in (now, before)))


def numbers_at(pages: Pages, where: Any) -> np.ndarray:
    """float32 [tokens, kv_heads, head_dim]."""
    return np.asarray(dequantize(replace(pages, dtype="float32")) if isinstance(pages, Quantized) else pages, np.float32)[where]


def compare(got: np.ndarray, want: np.ndarray, kind: str, *, exact: bool) -> None:
    """Rotation and scales are in float32; the rounded results may differ by one step of the cache's dtype."""
    step = np.abs(want).max(-1, keepdims=True) / 127 if kind == "int8" else np.abs(want) * float(jnp.finfo(kind).eps) + 1e-6
    assert (np.abs(got - want) <= (0 if exact else step * 1.01)).all()  # false where one is NaN


@pytest.mark.parametrize(("kind", "dtype", "head_dim", "kv_heads", "page_size", "tokens", "pairs"), SMALL)
def test_the_reference_is_met(kind: str | None, dtype: str, head_dim: int, kv_heads: int, page_size: int, tokens: int, pairs: int) -> None:
    check(kind, dtype, head_dim, kv_heads, page_size, tokens, pairs)


SHAPES = [*itertools.product((None, "int8", "float8_e4m3fn"), (64, 128, 256), (16, 64, 128), (0, 24, 32), (1, 8, 27))]
HEADS_AND_DTYPES = [(1, "bfloat16"), (2, "float16"), (5, "bfloat16"), (3, "float16")]  # four: every shape meets others


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    kind, head_dim, page_size, pairs, tokens = SHAPES[index]
    kv_heads, dtype = HEADS_AND_DTYPES[index % len(HEADS_AND_DTYPES)]
    check(kind, dtype, head_dim, kv_heads, page_size, tokens, pairs)


def test_blocks_fill_the_chip_and_then_grow() -> None:
    head, blocks = 8 * 128 * 2, partial(heads_per_block, cores=100)
    assert blocks(tiles=1, kv_heads=8, head_bytes=head) == 1
    assert blocks(tiles=50, kv_heads=8, head_bytes=head) == 4
    assert blocks(tiles=1000, kv_heads=8, head_bytes=head) == 8
    assert blocks(tiles=1000, kv_heads=64, head_bytes=head) == BLOCK_BYTES // head
    assert blocks(tiles=1000, kv_heads=5, head_bytes=BLOCK_BYTES) == 1
