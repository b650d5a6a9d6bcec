"""XLA's forms of writing to a paged cache and copying its pages, for any device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.cache.qkv import Qkv, QkvProduct
from pallas_kernels.elementwise.rotary import Rotation, rotate_by_xla
from pallas_kernels.quantization.quantized import Pages, Quantized, movable, quantize

Queries = tuple[jax.Array, jax.Array]  # of decoding rows and of prompts, [tokens, heads, head_dim]


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
    """Normalizes and rotates queries and keys, and writes keys and values to their pages, in place if the
    caller donates the cache.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim]; if Quantized, each token of each head is
            quantized separately, so that tokens can be added to a page without changing its contents. Scales
            may have more rows than kv_heads; the others are unused.
        qkv: of the tokens; a QkvProduct with a norm is normalized first.
        page_ids: int32 [tokens]; padding uses the null page, 0, whose contents are undefined.
        offsets: int32 [tokens], in [0, page_size). No two tokens have the same place, except in the null
            page.
        rows: number of leading tokens whose queries are returned separately.
        rotation: rotates queries and keys, as `rotate_by_xla` does; None: no rotation.

    Returns:
        The queries of the first `rows` tokens [rows, heads, head_dim] and of the others, and the pages.
    """
    q, k, v = qkv.split()
    if rotation is not None:
        q, k = rotate_by_xla(q, rotation), rotate_by_xla(k, rotation)
    return (q[:rows], q[rows:]), (
        page_write(k_pages, k, page_ids, offsets),
        page_write(v_pages, v, page_ids, offsets),
    )


def page_write(pages: Any, new: jax.Array, page_ids: jax.Array, offsets: jax.Array) -> Any:
    """Writes keys or values [tokens, kv_heads, head_dim] to their pages, as `kv_write` does."""
    if isinstance(pages, Quantized):
        added = movable(quantize(new, pages.kind))
        values, scale = (
            page_write(pages.values, added.values, page_ids, offsets),
            page_write(pages.scale, added.scale, page_ids, offsets),
        )
        return dataclasses.replace(pages, values=values, scale=scale)
    return pages.at[page_ids, : new.shape[1], offsets].set(new.astype(pages.dtype))


def copy_pages(
    k_pages: Pages, v_pages: Pages, sources: jax.Array, destinations: jax.Array
) -> tuple[Pages, Pages]:
    """Copies whole pages, keys and values with their scales, in place if the caller donates the cache.

    Args:
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim], or Quantized.
        sources, destinations: int32 [copies], page ids. No page is written twice, or both written and read.
            Padding copies the null page, 0, to itself.
    """
    return copied(k_pages, sources, destinations), copied(v_pages, sources, destinations)


def copied(pages: Pages, sources: jax.Array, destinations: jax.Array) -> Pages:
    """`copy_pages` for one array."""
    new: Pages = jax.tree.map(lambda array: array.at[destinations].set(array[sources]), pages)
    return new
