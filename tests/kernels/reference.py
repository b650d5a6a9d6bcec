"""Naive implementations of every function, references for tests: attention in float64, others in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.cache.xla import Queries
from pallas_kernels.elementwise.rotary import Rotation
from pallas_kernels.quantization.quantized import Pages, Quantized, movable, numbers, quantize

Float64 = NDArray[np.float64]


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
) -> Float64:
    """See `xla.paged_attention_decode`; in float64."""
    tiles, last, real = q[:, None], np.asarray(lengths) - 1, np.minimum(lengths, 1)
    return paged_attention_prefill(tiles, k_pages, v_pages, block_tables, last, real, options)[:, 0]


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
) -> Float64:
    """See `xla.paged_attention_prefill`; in float64."""
    tile, heads, head_dim = q.shape[1:]
    queries, k, v = in_float64(q), in_float64(k_pages), in_float64(v_pages)
    by_kv_head = k.shape[1], heads // k.shape[1], 1, 1
    sinks = -np.inf if options.sinks is None else in_float64(options.sinks).reshape(by_kv_head)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    where = (np.asarray(x) for x in (block_tables, positions, lengths))
    for i, (table, position, length) in enumerate(zip(*where, strict=True)):
        at = position + np.arange(length)
        last = at if until is None else np.asarray(until)[i, :length]
        window = options.window or position + tile
        # tokens that a query sees
        token = np.arange(max(0, position - window + 1), last.max(initial=-1) + 1)
        page, place = table[token // k.shape[2]], token % k.shape[2]
        keys, values = (pages[page, :, place].swapaxes(0, 1)[:, None] for pages in (k, v))
        mine = queries[i, :length].reshape(length, *by_kv_head[:2], head_dim).transpose(1, 2, 0, 3)
        scores = mine @ keys.swapaxes(-1, -2) * options.scale  # [kv_heads, group, length, tokens]
        if options.soft_cap is not None:
            scores = options.soft_cap * np.tanh(scores / options.soft_cap)
        distance = at[:, None] - token
        if options.slopes is not None:
            scores -= in_float64(options.slopes).reshape(by_kv_head) * distance
        scores = np.where((token <= last[:, None]) & (distance < window), scores, -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sinks)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        out[i, :length] = (weights @ values / total).transpose(2, 0, 1, 3).reshape(out[i, :length].shape)
    return out


def in_float64(x: Pages) -> Float64:
    """The represented numbers."""
    if isinstance(x, Quantized):
        return in_float64(numbers(x)) * in_float64(x.scale)[..., None]
    return np.asarray(x).astype(np.float64)
