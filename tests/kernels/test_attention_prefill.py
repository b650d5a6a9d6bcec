"""The Hopper kernel for prefill attention against the float32 reference, interpreted on a CPU with race detection on."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels.attention_prefill import paged_attention_prefill
from tests.kernels.interpreted import RACES, cache, interpret

Ways = dict[str, Any]
PLAIN: Ways = {"scale": 0.2}
WINDOW: Ways = {"scale": 0.3, "window": 70}
CAP: Ways = {"scale": 0.5, "soft_cap": 3.0}
BOTH: Ways = {"scale": 0.3, "window": 33, "soft_cap": 20.0}

# head_dim, kv_heads, group, page_size, tile, dtype, ways
SMALL = [
    (128, 1, 2, 64, 64, "bfloat16", PLAIN),
    (64, 1, 3, 16, 64, "bfloat16", WINDOW),
    (64, 2, 1, 32, 64, "float16", CAP),
    (256, 1, 5, 64, 16, "bfloat16", BOTH),
    (64, 1, 1, 128, 128, "float16", BOTH),
]


def tiles(tile: int, page_size: int) -> tuple[list[int], list[int]]:
    """First positions and lengths: a first tile, whole; a chunk from mid-page, ending mid-page; padding; one token; later tiles, of which
    the last shares its first page with the one before."""
    return [0, page_size // 2 + 3, 0, page_size, 0, 2 * tile, 300 - tile], [tile, tile - 5, 0, 1, 1, tile, tile]


def check(head_dim: int, kv_heads: int, group: int, page_size: int, tile: int, dtype: str, ways: Ways) -> None:
    positions, lengths = tiles(tile, page_size)
    ends = [position + length for position, length in zip(positions, lengths, strict=True)]
    paged = cache(ends, -(-max(ends) // page_size), kv_heads, page_size, head_dim, dtype, seed=page_size)
    q = jax.random.normal(jax.random.key(7), (len(ends), tile, kv_heads * group, head_dim)).astype(dtype)
    run = jax.jit(partial(paged_attention_prefill, **ways, stages=2, operand_in_registers=False, interpret=RACES))
    where = jnp.asarray(positions), jnp.asarray(lengths)
    got = np.asarray(interpret(run, q, paged.k, paged.v, paged.tables, *where), np.float32)
    clean = paged.clean()
    want = np.asarray(reference.paged_attention_prefill(q.astype(jnp.float32), clean.k, clean.v, clean.tables, *where, **ways))
    # What is rounded to dtype: each weight, and the result. Anything else is float32.
    rounding = float(jnp.finfo(dtype).eps) / 2
    allowed = 1.05 * rounding * (np.abs(want) + float(jnp.abs(clean.v).max())) + 1e-5
    real = np.arange(tile) < np.array(lengths)[:, None]
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= allowed)[real].all()


@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "page_size", "tile", "dtype", "ways"), SMALL)
def test_the_reference_is_met(head_dim: int, kv_heads: int, group: int, page_size: int, tile: int, dtype: str, ways: Ways) -> None:
    check(head_dim, kv_heads, group, page_size, tile, dtype, ways)


SHAPES = [*itertools.product((64, 128, 256), (1, 2, 3, 8), (16, 64, 192), (PLAIN, WINDOW, CAP, BOTH))]
TILES_AND_DTYPES = [
    (64, "bfloat16"),
    (16, "float16"),
    (128, "bfloat16"),
    (64, "float16"),
    (48, "bfloat16"),
]  # five: every shape meets others


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_the_reference_is_met_everywhere(index: int) -> None:
    head_dim, group, page_size, ways = SHAPES[index]
    tile, dtype = TILES_AND_DTYPES[index % len(TILES_AND_DTYPES)]
    check(head_dim, 1, group, page_size, tile, dtype, ways)
