"""Paged attention on a CPU, one call for all rows or tiles; see `attention_kernel`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import native
from pallas_kernels.cpu.attention_form import form
from pallas_kernels.cpu.attention_kernel import NO_SINK, source
from pallas_kernels.cpu.calls import call, register
from pallas_kernels.quantized import Pages, Quantized


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """One query per sequence, over all of the sequence's tokens, as `xla.paged_attention_decode`. Weights and
    sums are float32.

    Args:
        q: bfloat16, float16 or float32 [rows, heads, head_dim].
        k_pages, v_pages: bfloat16 or float32 [num_pages, kv_heads, page_size, head_dim], or Quantized. Only
            tokens that the query attends to are read.
        block_tables: int32 [rows, width].
        lengths: int32 [rows].
        scale: above 0.
        sinks, slopes: float32 [heads], or None; slopes are at least 0.
    """
    return _call(
        q, k_pages, v_pages, (block_tables, lengths), scale, window, soft_cap, sinks, slopes, decode=True
    )


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Tiles of consecutive queries, as `xla.paged_attention_prefill`. Padding gives zeros.

    Sums are float32. So are weights, unless the queries are bfloat16 and the processor multiplies bfloat16
    pairs.

    Args:
        q: bfloat16, float16 or float32 [tiles, tile, heads, head_dim].
        block_tables, positions, lengths: int32 [tiles, width], [tiles] and [tiles].
        k_pages, v_pages, scale, sinks, slopes: as in `paged_attention_decode`.
    """
    return _call(
        q,
        k_pages,
        v_pages,
        (block_tables, lengths, positions),
        scale,
        window,
        soft_cap,
        sinks,
        slopes,
        decode=False,
    )


def prepare(q: Any, k_pages: Pages) -> None:
    """Registers the kernels of both functions for queries [..., heads, head_dim] and such a cache; abstract
    arrays suffice."""
    for decode in True, False:
        _registered(q, k_pages, decode)


def _registered(q: Any, k_pages: Pages, decode: bool) -> str:
    """Registers a kernel and returns its name."""
    stored = str(k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype)
    _, kv_heads, page_size, head_dim = k_pages.shape
    made = form(
        native.host(),
        stored,
        str(_inputs(q.dtype)),
        head_dim,
        page_size,
        q.shape[-2] // kv_heads,
        decode=decode,
    )
    return register(made.name, lambda: native.compiled(lambda: source(made), made.name, name=made.name))


def _inputs(dtype: Any) -> Any:
    return jnp.dtype(dtype) if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _call(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    where: tuple[jax.Array, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    *,
    decode: bool,
) -> jax.Array:
    name = _registered(q, k_pages, decode)
    k, v = (
        ([pages.values, pages.scale] if isinstance(pages, Quantized) else [pages])
        for pages in (k_pages, v_pages)
    )
    options = jnp.array([scale, soft_cap or 0.0, window or 0], jnp.float32)
    heads = q.shape[-2]
    sinks = jnp.full(heads, NO_SINK) if sinks is None else sinks
    # scores are multiplied by scale later
    slopes = jnp.zeros(heads) if slopes is None else slopes / (scale if soft_cap is None else 1.0)
    options = jnp.concatenate([options, sinks.astype(jnp.float32), slopes.astype(jnp.float32)])
    queries = q.astype(_inputs(q.dtype))
    out: jax.Array = call(
        name, jax.ShapeDtypeStruct(q.shape, queries.dtype), queries, *where, options, *k, *v
    )
    return out.astype(q.dtype)
