"""The XLA implementations compared with the naive ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.models.whole_sequences import WholeSequences
from pallas_kernels.attention import dispatch, xla
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache import xla as cache_xla
from pallas_kernels.cache.qkv import HeadNorm, Qkv, QkvProduct
from pallas_kernels.quantization.quantized import Quantized, dequantize, movable, quantize
from tests.kernels import reference
from tests.kernels.interpreted import more_scales, options_of

NUM_PAGES, WIDTH = 40, 7
WAYS = [
    {},
    {"soft_cap": 0.5},
    {"window": 1},
    {"window": 20},
    {"window": 80, "soft_cap": 2.0},
    {"window": 1000},
]
ALSO = [*WAYS, {"window": 20, "sinks": True, "slopes": True}]


def in_turn(cases, forms):
    """Each case in every second form, beginning with the first or the second in turn; the rest are long
    tests.
    """
    rest = pytest.mark.full
    return [
        pytest.param(*case, *form, marks=[rest] * ((i + j) % 2))
        for i, case in enumerate(cases)
        for j, form in enumerate(forms)
    ]


def cache(rng, kv_heads, page_size, head_dim, dtype):
    shape = (NUM_PAGES, kv_heads, page_size, head_dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))


def new_tokens(rng, tokens):
    """Of four query heads."""
    return Qkv(*(jnp.asarray(rng.normal(size=(tokens, heads, 8)), jnp.float32) for heads in (4, 2, 2)))


def poisoned(pages, tables, page_size, starts, ends):
    """NaN but for the tokens from each sequence's start to its end; of eight bits the scales, and numbers
    that are NaN in fp8.
    """
    used = np.zeros((NUM_PAGES, page_size), bool)
    for table, start, end in zip(np.asarray(tables), np.asarray(starts), np.asarray(ends), strict=True):
        for token in range(max(start, 0), end):
            used[table[token // page_size], token % page_size] = True

    def put(x, value):
        return jnp.where(used.reshape(NUM_PAGES, 1, page_size, *[1] * (x.ndim - 3)), x, value)

    if not isinstance(pages, Quantized):
        return put(pages, jnp.nan)
    return replace(pages, values=put(pages.values, 0x7F), scale=put(pages.scale, jnp.nan))


SHAPES = [*(((6, 1, 24, 16), how) for how in ALSO), ((4, 2, 64, 16), {}), ((3, 3, 32, 64), {})]
FORMS = [(0, "float32"), (0, "bfloat16"), (WIDTH, "bfloat16"), (WIDTH, "float32")]


@pytest.mark.parametrize(("shape", "how", "pages", "dtype"), in_turn(SHAPES, FORMS))
def test_decode_matches_reference(shape, how, pages, dtype):
    heads, kv_heads, head_dim, page_size = shape
    rng = np.random.default_rng(0)
    lengths = jnp.array(
        [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, WIDTH * page_size, 5], jnp.int32
    )
    # shared pages
    tables = jnp.asarray(rng.permutation(np.arange(1, NUM_PAGES))[None, :WIDTH] * np.ones((8, 1)), jnp.int32)
    tables = tables.at[6].set(jnp.arange(20, 20 + WIDTH))
    clean = cache(rng, kv_heads, page_size, head_dim, dtype)
    k, v = (poisoned(x, tables, page_size, lengths - how.get("window", 1000), lengths) for x in clean)
    q = jnp.asarray(rng.normal(size=(8, heads, head_dim)), dtype)
    options = options_of({"scale": 0.3, **how}, heads)
    run = jax.jit(partial(xla.paged_attention_decode, options=options, pages=pages))
    got = run(q, k, v, tables, lengths)
    np.testing.assert_array_equal(got, run(q, *clean, tables, lengths))
    want = reference.paged_attention_decode(q, k, v, tables, lengths, options)
    np.testing.assert_allclose(got[1:], want[1:], atol=2e-6 if dtype == "float32" else 2e-2)
    assert not np.any(np.asarray(got[0]))


TILES = [*((64, 16, how) for how in ALSO), (8, 16, {}), (64, 64, {})]


@pytest.mark.parametrize(("tile", "page_size", "how", "pages"), in_turn(TILES, [(0,), (WIDTH,)]))
def test_prefill_matches_reference(tile, page_size, pages, how):
    rng = np.random.default_rng(1)
    clean = cache(rng, 2, page_size, 32, "float32")
    tables = jnp.asarray(
        np.stack([rng.permutation(np.arange(1, NUM_PAGES))[:WIDTH] for _ in range(4)]), jnp.int32
    )
    positions = jnp.array([0, page_size - 1, 0, WIDTH * page_size - tile], jnp.int32)
    lengths = jnp.array([tile, tile // 2, 0, tile], jnp.int32)
    q = jnp.asarray(rng.normal(size=(4, tile, 6, 32)), jnp.float32)
    starts, where = positions + 1 - how.get("window", 1000), (tables, positions, lengths)
    seen = [poisoned(x, tables, page_size, starts, positions + lengths) for x in clean]
    options = options_of({"scale": 0.2, **how}, 6)
    run = jax.jit(partial(xla.paged_attention_prefill, options=options, pages=pages))
    got = np.asarray(run(q, *seen, *where))
    np.testing.assert_array_equal(got, run(q, *clean, *where))
    want = reference.paged_attention_prefill(q, *seen, *where, options)
    for i, n in enumerate(np.asarray(lengths)):
        np.testing.assert_allclose(got[i, :n], want[i, :n], atol=2e-6)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("how", [{}, {"window": 20, "soft_cap": 0.5}])
@pytest.mark.parametrize("pages", [0, WIDTH])
def test_tokens_of_an_image_see_each_other_across_tiles(how, pages):
    """As attention of the whole sequence has it. The image ends within a tile; NaN follows the last token."""
    tokens, tile, options = 3 * 16 - 5, 16, AttentionOptions(0.3, **how)
    rng, until = np.random.default_rng(6), np.arange(48, dtype=np.int32)
    until[6:38] = 37
    q, k, v = (jnp.asarray(rng.normal(size=(48, heads, 32)), jnp.float32) for heads in (4, 2, 2))
    whole = WholeSequences(1, jnp.asarray(until[:tokens]))
    want = whole(0, Qkv(q[:tokens], k[:tokens], v[:tokens]), None, options)
    tables = jnp.asarray(rng.permutation(np.arange(1, 1 + WIDTH)), jnp.int32)
    known = jnp.arange(48) < tokens
    own = [
        jnp.full((NUM_PAGES, 2, 16, 32), jnp.nan)
        .at[tables[:3]]
        .set(jnp.where(known[:, None, None], x, jnp.nan).reshape(3, 16, 2, 32).swapaxes(1, 2))
        for x in (k, v)
    ]
    where = jnp.tile(tables, (3, 1)), jnp.arange(3) * tile, jnp.array([tile, tile, tile - 5])
    until = jnp.asarray(until).reshape(3, tile)
    by_kernel = partial(dispatch.paged_attention_prefill, impl="llvm")
    by_xla = partial(xla.paged_attention_prefill, pages=pages)
    in_jit = (jax.jit(partial(attend, options=options)) for attend in (by_xla, by_kernel))
    for attend in (*in_jit, partial(reference.paged_attention_prefill, options=options)):
        got = attend(q.reshape(3, tile, 4, 32), *own, *where, until=until)
        np.testing.assert_allclose(got.reshape(48, 4, 32)[:tokens], want, atol=2e-6)
    with pytest.raises(ValueError, match=r"^until: not with slopes"):
        slopes = replace(options, slopes=jnp.ones(4))
        xla.paged_attention_prefill(q.reshape(3, tile, 4, 32), *own, *where, slopes, until=until)
        by_kernel(q.reshape(3, tile, 4, 32), *own, *where, slopes, until=until)


def test_a_window_and_a_cap_change_the_result_and_a_wide_window_does_not():
    rng = np.random.default_rng(3)
    k, v = cache(rng, 2, 16, 32, "float32")
    tables, lengths = jnp.arange(1, 1 + WIDTH, dtype=jnp.int32)[None], jnp.array([100], jnp.int32)
    q = jnp.asarray(rng.normal(size=(1, 4, 32)), jnp.float32)
    plain, *others = (
        reference.paged_attention_decode(q, k, v, tables, lengths, AttentionOptions(0.3, **how))
        for how in WAYS
    )
    differs = [not np.allclose(plain, other, atol=1e-3) for other in others]
    assert differs == [True, True, True, True, False]
    alone = reference.paged_attention_decode(q, k, v, tables, lengths, AttentionOptions(0.3, window=1))
    last = v[tables[0, 99 // 16], :, 99 % 16]  # a query that sees its own token only takes its value
    np.testing.assert_allclose(alone[0], np.repeat(last, 2, axis=0), atol=1e-6)


@pytest.mark.parametrize("static", [False, True])
def test_what_rows_hold_behind_their_windows_changes_no_bit(static):
    """NaN pages, and the null page, which rows with later windows read where others of their group have
    theirs.
    """
    rng = np.random.default_rng(4)
    lengths = jnp.array([0, 100, 300, 98, 0, 212, 129, 40], jnp.int32)
    tables = jnp.arange(1, 161, dtype=jnp.int32).reshape(8, 20)
    behind = jnp.arange(20) < (lengths[:, None] - 20) // 16  # a page of which a token is seen is not
    clean = [jnp.asarray(rng.normal(size=(161, 2, 16, 32)), jnp.float32) for _ in range(2)]
    k, v = (x.at[0].set(jnp.nan).at[jnp.where(behind, tables, 0)].set(jnp.nan) for x in clean)
    freed = jnp.where(behind & (tables % 2 == 0), 0, tables)
    q = jnp.asarray(rng.normal(size=(8, 4, 32)), jnp.float32)
    run = jax.jit(
        partial(
            xla.paged_attention_decode, options=AttentionOptions(0.3, window=20), pages=20 if static else 0
        )
    )
    np.testing.assert_array_equal(run(q, k, v, freed, lengths), run(q, *clean, tables, lengths))


def test_blocks_before_the_window_are_not_read(monkeypatch):
    """The loop of each few rows starts at the first block that one of them sees."""
    rng = np.random.default_rng(4)
    k, v = cache(rng, 2, 16, 32, "float32")
    bounds, loop = [], jax.lax.fori_loop

    def fori_loop(first, end, *rest):
        bounds.append((int(first), int(end)))
        return loop(first, end, *rest)

    monkeypatch.setattr(jax.lax, "fori_loop", fori_loop)
    tables, lengths = jnp.ones((4, 24), jnp.int32), jnp.array([0, 300, 100, 380], jnp.int32)
    with jax.disable_jit():
        xla.paged_attention_decode(
            jnp.ones((4, 4, 32)), k, v, tables, lengths, AttentionOptions(0.3, window=20)
        )
    assert bounds == [(280 // xla.DECODE_BLOCK, 3), (0, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_write_touches_its_own_tokens_only(dtype):
    rng = np.random.default_rng(2)
    k, v = cache(rng, 2, 16, 8, dtype)
    new = new_tokens(rng, 5)
    where = jnp.array([3, 3, 9, 1, 30], jnp.int32), jnp.array([0, 15, 4, 7, 2], jnp.int32)
    (_, got), (_, want) = (f.kv_write(k, v, new, *where, rows=2) for f in (cache_xla, reference))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("pairs", [2, 4])
def test_a_write_may_rotate_queries_and_keys(pairs):
    rng = np.random.default_rng(3)
    k, v = cache(rng, 2, 16, 8, "float32")
    new = new_tokens(rng, 3)
    where = jnp.array([3, 9, 1], jnp.int32), jnp.array([0, 15, 4], jnp.int32)
    angles = jnp.asarray(rng.normal(size=(3, pairs)), jnp.float32)
    rotation = jnp.cos(angles), jnp.sin(angles)
    got, want = (f.kv_write(k, v, new, *where, rows=1, rotation=rotation) for f in (cache_xla, reference))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), got, want)
    assert [len(part) for part in got[0]] == [1, 2]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_product_is_split_and_normed(offset):
    rng = np.random.default_rng(7)
    k, v = cache(rng, 2, 16, 8, "float32")
    # of three queries, and a row that is not read
    rows, weights = rng.normal(size=(3, 2, 6, 8)), rng.normal(size=(2, 8))
    where = jnp.array([3, 9, 1], jnp.int32), jnp.array([0, 15, 4], jnp.int32)
    product = QkvProduct(
        jnp.asarray(rows, jnp.float32), 3, HeadNorm(*jnp.asarray(weights, jnp.float32), 1e-3, offset)
    )
    (decoding, prompts), (k_pages, v_pages) = cache_xla.kv_write(k, v, product, *where, rows=1)
    normed = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-3)
    q, keys = (
        normed[:, :, :3].reshape(3, 6, 8) * (weights[0] + offset),
        normed[:, :, 3] * (weights[1] + offset),
    )
    np.testing.assert_allclose(np.concatenate([decoding, prompts]), q, atol=1e-5)
    np.testing.assert_allclose(k_pages[where[0], :, where[1]], keys, atol=1e-5)
    np.testing.assert_allclose(v_pages[where[0], :, where[1]], rows[:, :, 4], atol=1e-6)
    again = product.split().joined()
    np.testing.assert_allclose(again.rows[:, :, :3].reshape(3, 6, 8), q, atol=1e-5)
    assert again.group == 3 and again.norm is None


@pytest.mark.parametrize("kind", [None, "int8", "float8_e4m3fn"])
def test_pages_are_copied_with_their_scales(kind):
    k, v = cache(np.random.default_rng(4), 2, 16, 8, "float32")
    if kind:
        k, v = (movable(quantize(x, kind)) for x in (k, v))
    ids = jnp.array([3, 0, 7], jnp.int32), jnp.array([5, 0, 2], jnp.int32)
    got, want = (f.copy_pages(k, v, *ids) for f in (cache_xla, reference))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[ids[1]], old[ids[0]]), got, (k, v))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[8:], old[8:]), got, (k, v))


EIGHT_BITS = [("int8", 0), ("int8", WIDTH), ("float8_e4m3fn", WIDTH), ("float8_e4m3fn", 0)]


@pytest.mark.parametrize(("how", "kind", "pages"), in_turn([(how,) for how in WAYS[:4]], EIGHT_BITS))
def test_eight_bit_caches_match_reference(kind, how, pages):
    """NaN scales and values of tokens that no query attends to do not change the result."""
    rng, options = np.random.default_rng(5), AttentionOptions(0.3, **how)
    k, v = (movable(quantize(x, kind)) for x in cache(rng, 2, 16, 32, "float32"))
    lengths = jnp.array([0, 1, 15, 16, 17, 48, WIDTH * 16, 5], jnp.int32)
    tables = jnp.asarray(
        np.stack([rng.permutation(np.arange(1, NUM_PAGES))[:WIDTH] for _ in range(8)]), jnp.int32
    )
    q = jnp.asarray(rng.normal(size=(8, 4, 32)), jnp.float32)
    want = reference.paged_attention_decode(q, k, v, tables, lengths, options)
    seen = [poisoned(x, tables, 16, lengths - how.get("window", 1000), lengths) for x in (k, v)]
    run = jax.jit(partial(xla.paged_attention_decode, options=options, pages=pages))
    got = run(q, *map(more_scales, seen), tables, lengths)
    np.testing.assert_array_equal(got, run(q, k, v, tables, lengths))
    np.testing.assert_allclose(got, want, atol=2e-6)
    tiles, positions, real = q[:, None].repeat(8, 1), lengths // 2, jnp.minimum(lengths, 8)
    where = tables, positions, real
    want = reference.paged_attention_prefill(tiles, k, v, *where, options)
    seen = [
        poisoned(x, tables, 16, positions + 1 - how.get("window", 1000), positions + real) for x in (k, v)
    ]
    run = jax.jit(partial(xla.paged_attention_prefill, options=options, pages=pages))
    got = run(tiles, *map(more_scales, seen), *where)
    np.testing.assert_array_equal(got, run(tiles, k, v, *where))
    for i, n in enumerate(np.asarray(real)):
        np.testing.assert_allclose(got[i, :n], want[i, :n], atol=2e-6)


@pytest.mark.parametrize(("kind", "error"), [("int8", 0.5 / 127), ("float8_e4m3fn", 1 / 16)])
def test_an_eight_bit_write_changes_its_own_tokens_only(kind, error):
    rng = np.random.default_rng(6)
    k, v = (movable(quantize(x, kind)) for x in cache(rng, 2, 16, 8, "float32"))
    added = new_tokens(rng, 5)
    where = jnp.array([3, 3, 9, 1, 30], jnp.int32), jnp.array([0, 15, 4, 7, 2], jnp.int32)
    (_, got), (_, wanted) = (f.kv_write(k, v, added, *where, rows=5) for f in (cache_xla, reference))
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(dequantize(mine), dequantize(want))
    for mine, old, new in zip(got, (k, v), (added.k, added.v), strict=True):
        written = dequantize(mine)[where[0], :, where[1]]
        assert np.all(np.abs(written - new) <= error * np.abs(new).max(-1, keepdims=True) * 1.0001)
        untouched = np.ones((NUM_PAGES, 16), bool)
        untouched[where] = False
        np.testing.assert_array_equal(
            np.asarray(mine.scale).swapaxes(1, 2)[untouched], np.asarray(old.scale).swapaxes(1, 2)[untouched]
        )
