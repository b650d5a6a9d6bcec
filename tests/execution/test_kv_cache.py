"""The cache consists of the arrays that groups declare, sharded or not, in pools."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.kv_cache import (
    COPIES,
    abstract_cache,
    abstract_page,
    fill_pages,
    make_copy,
    page_bytes,
    spill_pages,
)
from jengine.models.cache import TOKENS, CacheGroup, PageArray
from jengine.parallel.mesh import make_mesh
from jengine.table.program_table import SWAPS

FLAT, HEADS = PageArray((TOKENS, 6), sharded=None), PageArray((2, TOKENS, 4))
STATE = PageArray((2, 3, 5), dtype="float32")
GROUPS = (  # of the first pool: a place has three arrays of two kinds, of which one is not sharded
    CacheGroup("full", (0, 3, 4), None, (HEADS, FLAT, HEADS)),
    CacheGroup("window", (1, 2), 8, (HEADS, FLAT, HEADS)),
    CacheGroup("full", (5,), None, (STATE,), pool=1),
)
PAGES, PAGE_SIZE, DTYPE = 2 * SWAPS, 4, np.dtype("bfloat16")


def test_arrays_are_as_declared() -> None:
    cache = abstract_cache(GROUPS, (PAGES, 7), PAGE_SIZE, DTYPE, make_mesh(1))
    assert [[tuple((x.shape, str(x.dtype)) for x in place) for place in pool] for pool in cache] == [
        [(((PAGES, 2, 4, 4), "bfloat16"), ((PAGES, 4, 6), "bfloat16"), ((PAGES, 2, 4, 4), "bfloat16"))] * 3,
        [(((7, 2, 3, 5), "float32"),)],
    ]
    assert [tuple(x.sharding.spec) for x in cache[0][0]] == [(None, "tensor"), (), (None, "tensor")]
    assert page_bytes(GROUPS, 0, PAGE_SIZE, DTYPE, devices=1) == 3 * 2 * (32 + 24 + 32)
    assert page_bytes(GROUPS, 0, PAGE_SIZE, DTYPE, devices=2) == 3 * 2 * (16 + 24 + 16), (
        "the flat one is on both"
    )
    assert page_bytes(GROUPS, 1, PAGE_SIZE, DTYPE, devices=2) == 4 * 15
    assert sum(group.token_bytes(2, devices=2) for group in GROUPS[:2]) == 5 * 2 * (4 + 6 + 4)


def test_eight_bits_have_a_scale_for_each_row() -> None:
    cache = abstract_cache(GROUPS[:2], (PAGES,), PAGE_SIZE, np.dtype("int8"), make_mesh(1))
    assert [(x.values.shape, x.scale.shape) for x in cache[0][0][:2]] == [
        ((PAGES, 2, 4, 4), (PAGES, 2, 4)),
        ((PAGES, 4, 6), (PAGES, 4)),
    ]


def test_whole_pages_of_any_arrays_are_copied_and_swapped() -> None:
    rng, mesh = np.random.default_rng(0), make_mesh(1)
    like = abstract_cache(GROUPS, (PAGES, 7), PAGE_SIZE, DTYPE, mesh)
    cache = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), like)
    sources, targets = np.zeros((2, COPIES), np.int32)
    sources[:2], targets[:2] = (3, 5), (9, 11)
    copied = make_copy(jax.devices()[0])(cache, jnp.asarray(sources), jnp.asarray(targets))
    numbers = np.arange(1, SWAPS + 1, dtype=np.int32)
    spilled = spill_pages(cache, jnp.asarray(numbers))
    wanted = abstract_page(GROUPS, PAGE_SIZE, DTYPE, mesh)
    assert (
        [(x.shape, x.dtype) for x in spilled[0]]
        == [(x.shape, x.dtype) for x in wanted]
        == [((6, 2, 4, 4), DTYPE), ((3, 4, 6), DTYPE)]
    )
    filled = fill_pages(cache, spilled[::-1], jnp.asarray(numbers))
    assert jax.tree.structure(copied) == jax.tree.structure(filled) == jax.tree.structure(cache)
    for before, copy, fill in zip(*map(jax.tree.leaves, (cache[0], copied[0], filled[0])), strict=True):
        want = np.array(before)
        want[[9, 11]] = want[[3, 5]]
        assert np.array_equal(copy, want)
        assert np.array_equal(np.asarray(fill)[1 : SWAPS + 1], np.asarray(before)[SWAPS:0:-1])
    for before, copy, fill in zip(*map(jax.tree.leaves, (cache[1], copied[1], filled[1])), strict=True):
        assert np.array_equal(copy, before) and np.array_equal(fill, before), "pages of other pools stay"
