"""Naive float32 implementations of every function, as references for tests.

They gather each sequence's whole block table, so they are only suitable for tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.quantization.quantized import Pages, Quantized, dequantize, movable, quantize


def kv_write(
    k_pages: Pages,
    v_pages: Pages,
    qkv: Qkv | QkvProduct,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    rows: int,
    rotation: Rotation | None = None,
) -> tuple[Queries, tuple[Pages, Pages]]:
    """See `cache.xla.kv_write`; nothing is rounded between norm and rotation."""
    dtype, wide = qkv.dtype, jax.tree.map(lambda x: x.astype(jnp.float32), qkv)
    q, k, v = wide.split()

    def put(pages: Any, new: jax.Array) -> Any:
        if isinstance(pages, Quantized):
            added = movable(quantize(new, pages.kind))
            return dataclasses.replace(
                pages, values=put(pages.values, added.values), scale=put(pages.scale, added.scale)
            )

        def one(i: jax.Array, pages: jax.Array) -> jax.Array:
            return pages.at[page_ids[i], :, offsets[i]].set(new[i].astype(pages.dtype))

        written: jax.Array = jax.lax.fori_loop(0, new.shape[0], one, pages)
        return written

    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    q = q.astype(dtype)
    return (q[:rows], q[rows:]), (put(k_pages, k.astype(dtype)), put(v_pages, v.astype(dtype)))


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """See `rotary.rotate_by_xla`. Implemented as a product of complex numbers."""
    cos, sin = (part[:, None] for part in rotation)
    pairs = cos.shape[-1]
    wide = x.astype(jnp.float32)
    turned = (wide[..., :pairs] + 1j * wide[..., pairs : 2 * pairs]) * (cos + 1j * sin)
    return wide.at[..., : 2 * pairs].set(jnp.concatenate([turned.real, turned.imag], axis=-1)).astype(x.dtype)


def copy_pages(
    k_pages: Pages, v_pages: Pages, sources: jax.Array, destinations: jax.Array
) -> tuple[Pages, Pages]:
    """See `cache.xla.copy_pages`."""

    def one(i: jax.Array, pages: jax.Array) -> jax.Array:
        return pages.at[destinations[i]].set(pages[sources[i]])

    def copied(pages: jax.Array) -> jax.Array:
        done: jax.Array = jax.lax.fori_loop(0, sources.shape[0], one, pages)
        return done

    return jax.tree.map(copied, k_pages), jax.tree.map(copied, v_pages)


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """See `xla.paged_attention_decode`."""
    tiles, real = q[:, None], jnp.minimum(lengths, 1)
    return paged_attention_prefill(tiles, k_pages, v_pages, block_tables, lengths - 1, real, options)[:, 0]


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    until: jax.Array | None = None,
) -> jax.Array:
    """See `xla.paged_attention_prefill`."""
    tiles, tile, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    width = block_tables.shape[1] * page_size

    def tokens(pages: Pages) -> jax.Array:  # [tiles, kv_heads, width, head_dim]
        pages = (
            dequantize(dataclasses.replace(pages, dtype="float32")) if isinstance(pages, Quantized) else pages
        )
        return (
            pages[block_tables]
            .astype(jnp.float32)
            .transpose(0, 2, 1, 3, 4)
            .reshape(tiles, kv_heads, width, head_dim)
        )

    grouped = q.astype(jnp.float32).reshape(tiles, tile, kv_heads, heads // kv_heads, head_dim)
    k, v = tokens(k_pages), tokens(v_pages)
    at = positions[:, None] + jnp.arange(tile)
    token, window = jnp.arange(width), options.window or width + tile
    last = at if until is None else until
    # attended to by any query
    end = jnp.where(jnp.arange(tile) < lengths[:, None], last + 1, 0).max(1)
    used = (token < end[:, None]) & (token > positions[:, None] - window)
    v = jnp.where(used[:, None, :, None], v, 0.0)
    distance = at[..., None] - token
    seen = (token <= last[..., None]) & (distance < window) & used[:, None]
    scores = jnp.einsum("tqhgd,thkd->thgqk", grouped, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    if options.slopes is not None:
        scores -= options.slopes.reshape(*scores.shape[1:3], 1, 1) * distance[:, None, None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    sink = jnp.full(heads, -jnp.inf) if options.sinks is None else options.sinks
    sink = jnp.broadcast_to(sink.reshape(*scores.shape[1:3], 1, 1), (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("thgqk,thkd->tqhgd", weights, v).reshape(q.shape)
    real = jnp.arange(tile) < lengths[:, None]
    return jnp.where(real[..., None, None], out, 0.0).astype(q.dtype)
