"""Naive float32 forms of every function: the truth that the others are tested against.

They gather each sequence's whole block table, so they are for tests only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, page_ids: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `xla.kv_write`."""
    for i in range(k.shape[0]):
        k_pages = k_pages.at[page_ids[i], :, offsets[i]].set(k[i].astype(k_pages.dtype))
        v_pages = v_pages.at[page_ids[i], :, offsets[i]].set(v[i].astype(v_pages.dtype))
    return k_pages, v_pages


def paged_attention_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `xla.paged_attention_decode`."""
    tiles, real = q[:, None], jnp.minimum(lengths, 1)
    out = paged_attention_prefill(tiles, k_pages, v_pages, block_tables, lengths - 1, real, scale=scale, window=window, soft_cap=soft_cap)
    return out[:, 0]


def paged_attention_prefill(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """See `xla.paged_attention_prefill`."""
    tiles, tile, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    width = block_tables.shape[1] * page_size

    def tokens(pages: jax.Array) -> jax.Array:  # [tiles, kv_heads, width, head_dim]
        return pages[block_tables].astype(jnp.float32).transpose(0, 2, 1, 3, 4).reshape(tiles, kv_heads, width, head_dim)

    grouped = q.astype(jnp.float32).reshape(tiles, tile, kv_heads, heads // kv_heads, head_dim)
    k, v = tokens(k_pages), tokens(v_pages)
    at = positions[:, None] + jnp.arange(tile)
    used = jnp.arange(width) < (positions + lengths)[:, None]
    v = jnp.where(used[:, None, :, None], v, 0.0)
    distance = at[..., None] - jnp.arange(width)
    seen = (distance >= 0) & (distance < (window or width + tile)) & used[:, None]
    scores = jnp.einsum("tqhgd,thkd->thgqk", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("thgqk,thkd->tqhgd", weights, v).reshape(q.shape)
    real = jnp.arange(tile) < lengths[:, None]
    return jnp.where(real[..., None, None], out, 0.0).astype(q.dtype)
