"""XLA implementations of every function, for CPUs and for GPUs without a suitable kernel.

Attention is an online softmax over blocks of pages (Milakov and Gimelshein, 2018; Dao et al., 2022). The
number of blocks in a loop is a device value on a CPU. On a GPU it is static (`pages`), since XLA would wait
for the host at a loop of unknown length.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import MASKED, weight_factor
from pallas_kernels.quantization.quantized import Pages, Quantized, numbers

ROW_GROUP = 8  # decode rows that share a loop, whose length is that of the longest
# the same if there are at most ROW_GROUP rows: many of them may be padding, which should not loop
FEW_GROUP = 2
DECODE_BLOCK = PREFILL_BLOCK = 128  # tokens read at a time


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    pages: int = 0,
) -> jax.Array:
    """One query per sequence, over all of the sequence's tokens.

    Args:
        q: [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], or Quantized. Contents for tokens that
            no query attends to, NaN included, never affect a result.
        block_tables: int32 [rows, width], page ids in order; pages behind the window may be another
            sequence's, or the null page.
        lengths: int32 [rows], tokens of each sequence, the query's own included; 0 gives zeros.
        pages: number of pages read of every sequence; 0: as many as the longest of each group of rows has.

    Returns:
        [rows, heads, head_dim], in q's dtype.
    """
    rows = q.shape[0]
    group = math.gcd(rows, ROW_GROUP if rows > ROW_GROUP else FEW_GROUP)
    dtype = q.dtype if pages else jnp.float32
    queries = q.reshape(rows // group, group, 1, *q.shape[1:])

    def one(args: tuple[jax.Array, ...]) -> jax.Array:
        q, table, length = args
        shape = options, pages, DECODE_BLOCK, dtype
        return _attend(q, k_pages, v_pages, table, length - 1, length, *shape)

    out: jax.Array = lax.map(
        one, (queries, block_tables.reshape(rows // group, group, -1), lengths.reshape(rows // group, group))
    )
    return out.reshape(q.shape)


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    pages: int = 0,
    until: jax.Array | None = None,
) -> jax.Array:
    """Tiles of consecutive queries, each of one sequence, causal over the tokens in its pages, or further.

    Args:
        q: [tiles, tile, heads, head_dim]; the tile's own keys and values are already in the pages.
        k_pages, v_pages, pages: as in `paged_attention_decode`.
        block_tables: int32 [tiles, width]; pages behind the first query's window may be another sequence's,
            or the null page.
        positions: int32 [tiles], of each tile's first query.
        lengths: int32 [tiles], real queries in each tile; the rest give undefined, finite values.
        until: int32 [tiles, tile], the position of the last token that each query sees, at least its own;
            all keys and values up to there are in the pages. None: its own position.

    Returns:
        [tiles, tile, heads, head_dim], in q's dtype.

    Raises:
        ValueError: until is given with slopes.
    """
    if until is not None and options.slopes is not None:
        raise ValueError("until: not with slopes, which take no distance to later tokens")

    def one(i: jax.Array, tiles: jax.Array) -> jax.Array:
        tile, table, position, length = (
            lax.dynamic_slice_in_dim(x, i, 1) for x in (tiles, block_tables, positions, lengths)
        )
        shape, end, last = (options, pages, PREFILL_BLOCK, q.dtype), position + length, None
        if until is not None:
            real = jnp.arange(q.shape[1]) < length[:, None]
            last = jnp.where(real, lax.dynamic_slice_in_dim(until, i, 1), 0)
            end = jnp.where(length > 0, jnp.maximum(end, last.max(1) + 1), end)
        out = _attend(tile, k_pages, v_pages, table, position, end, *shape, until=last)
        return lax.dynamic_update_slice_in_dim(tiles, out, i, 0)

    out: jax.Array = lax.fori_loop(0, q.shape[0], one, q)  # results replace the queries: nothing is copied
    return out


def _read(pages: Pages, ids: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array | None]:
    """Reads pages ids [n, step] as [n, kv_heads, tokens, head_dim]. Scales [n, kv_heads, tokens] are applied
    to scores and weights.

    Heads come first, in the layout that products use.
    """
    # [n, kv_heads, step, page_size, head_dim]
    some = pages[ids[:, None], jnp.arange(pages.shape[1])[:, None]]
    shape = (*some.shape[:2], -1)
    if not isinstance(some, Quantized):
        return some.reshape(*shape, some.shape[-1]).astype(dtype), None
    return numbers(some).reshape(*shape, some.shape[-1]).astype(dtype), some.scale.reshape(shape)


def _attend(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    tables: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    options: AttentionOptions,
    pages: int,
    block: int,
    dtype: jax.typing.DTypeLike,
    until: jax.Array | None = None,
) -> jax.Array:
    """q [n, queries, heads, head_dim] at positions[n] + arange(queries), over tokens [0, ends[n]); products
    in dtype. until [n, queries]: the last token that each query sees; None: its own.
    """
    n, queries, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    window, soft_cap, sinks, slopes = options.window, options.soft_cap, options.sinks, options.slopes
    width = tables.shape[1]
    step = min(max(block // page_size, 1), pages or width)  # pages in a block
    span = step * page_size
    grouped = (
        q.reshape(n, queries, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4).astype(dtype)
    )
    at = positions[:, None] + jnp.arange(queries)
    last = at if until is None else until
    # earlier tokens may be another sequence's, or NaN
    oldest = None if window is None else positions - window + 1

    enlarged = weight_factor(dtype, scaled=isinstance(v_pages, Quantized))

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, total, acc = carry
        index = i * step + jnp.arange(step)
        ids = jnp.where(index < width, tables[:, jnp.minimum(index, width - 1)], 0)
        token = i * span + jnp.arange(span)
        used = token < ends[:, None]  # [n, span], attended to by any query
        if oldest is not None:
            used &= token >= oldest[:, None]
        k, k_scale = _read(k_pages, ids, dtype)
        v, v_scale = _read(v_pages, ids, dtype)
        v = jnp.where(used[:, None, :, None], v, 0)  # 0 * NaN is NaN
        s = jnp.einsum("nhgqd,nhtd->nhgqt", grouped, k, preferred_element_type=jnp.float32) * options.scale
        if k_scale is not None:
            s *= k_scale[:, :, None, None]
        if soft_cap is not None:
            s = soft_cap * jnp.tanh(s / soft_cap)
        if slopes is not None:
            s -= slopes.reshape(*s.shape[1:3], 1, 1) * (at[..., None] - token)[:, None, None].astype(
                jnp.float32
            )
        seen = (token <= last[..., None]) & used[:, None]
        if window is not None:
            seen &= token > at[..., None] - window
        seen = seen[:, None, None]  # [n, 1, 1, queries, span]
        s = jnp.where(seen, s, MASKED)
        m_new = jnp.maximum(m, s.max(-1))
        p = jnp.where(seen, jnp.exp(s - m_new[..., None]), 0.0)
        alpha = jnp.exp(m - m_new)
        weights = p
        if v_scale is not None:
            weights *= jnp.where(used[:, None], v_scale * enlarged, 0)[:, :, None, None]
        pv = jnp.einsum("nhgqt,nhtd->nhgqd", weights.astype(dtype), v, preferred_element_type=jnp.float32)
        return m_new, total * alpha + p.sum(-1), acc * alpha[..., None] + pv

    shape = (n, kv_heads, heads // kv_heads, queries)
    start = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    blocks = -(-pages // step) if pages else (jnp.max(ends) + span - 1) // span
    first: int | jax.Array = 0
    if oldest is not None and not pages:  # the first block that any row attends to
        first = jnp.maximum(jnp.min(jnp.where(ends > 0, oldest, 2**31 - 1)), 0) // span
    m, total, acc = lax.fori_loop(first, blocks, body, start)
    if sinks is not None:
        total += jnp.exp(sinks.reshape(*shape[1:3], 1) - m)
    out: jax.Array = acc / (enlarged * jnp.maximum(total, 1e-30))[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(n, queries, heads, head_dim).astype(q.dtype)
