"""Paged attention on a CPU, one call for all rows or tiles; see `attention_kernel`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.cpu.form import form
from pallas_kernels.attention.cpu.kernel import NO_SINK, source
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.llvm import native
from pallas_kernels.llvm.calls import call, register
from pallas_kernels.quantization.quantized import Pages


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
) -> jax.Array:
    """One query per row, over all tokens of its sequence, as `xla.paged_attention_decode`. Weights and sums
    are float32.

    Neighbouring rows with lengths n, n + 1, ... and the same pages share reads. The bits of a row do not
    depend on this; but if its values are not finite, those of the rows before it are not either.

    Args:
        q: bfloat16, float16 or float32 [rows, heads, head_dim].
        k_pages, v_pages: bfloat16 or float32 [num_pages, kv_heads, page_size, head_dim], or Quantized. Only
            tokens that the query attends to are read.
        block_tables: int32 [rows, width].
        lengths: int32 [rows].
        options: scale is positive.
    """
    return _call(q, k_pages, v_pages, (block_tables, lengths), options, decode=True)


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
    """Tiles of consecutive queries, as `xla.paged_attention_prefill`. Padding gives zeros.

    Sums are float32. So are weights, unless the queries are bfloat16 and the processor multiplies bfloat16
    pairs.

    Args:
        q: bfloat16, float16 or float32 [tiles, tile, heads, head_dim].
        block_tables, positions, lengths, until: int32 [tiles, width], [tiles], [tiles] and [tiles, tile].
        k_pages, v_pages, options: as in `paged_attention_decode`.
    """
    where = (block_tables, lengths, positions) if until is None else (block_tables, lengths, positions, until)
    return _call(q, k_pages, v_pages, where, options, decode=False)


def prepare(q: Any, k_pages: Pages, *, ahead: bool = False) -> None:
    """Registers the kernels of both functions for queries [..., heads, head_dim] and such a cache; abstract
    arrays suffice.

    Args:
        ahead: whether queries of tiles may see later tokens, in some layers.
    """
    _registered(q, k_pages, decode=True)
    for further in {False, ahead}:
        _registered(q, k_pages, decode=False, ahead=further)


def _registered(q: Any, k_pages: Pages, *, decode: bool, ahead: bool = False) -> str:
    """Registers a kernel and returns its name."""
    stored = str(jax.tree.leaves(k_pages)[0].dtype)
    _, kv_heads, page_size, head_dim = k_pages.shape
    made = form(
        native.host(),
        stored,
        str(_inputs(q.dtype)),
        head_dim,
        page_size,
        q.shape[-2] // kv_heads,
        decode=decode,
        ahead=ahead,
    )
    return register(made.name, lambda: native.compiled(lambda: source(made), made.name, name=made.name))


def _inputs(dtype: Any) -> Any:
    return jnp.dtype(dtype) if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _call(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    where: tuple[jax.Array, ...],
    options: AttentionOptions,
    *,
    decode: bool,
) -> jax.Array:
    name = _registered(q, k_pages, decode=decode, ahead=len(where) == 4)
    queries = q.astype(_inputs(q.dtype))
    out: jax.Array = call(
        name,
        jax.ShapeDtypeStruct(q.shape, queries.dtype),
        queries,
        *where,
        _packed(options, q.shape[-2]),
        *jax.tree.leaves((k_pages, v_pages)),
    )
    return out.astype(q.dtype)


def _packed(options: AttentionOptions, heads: int) -> jax.Array:
    """The options as the kernel reads them: float32 [3 + 2 * heads]."""
    first = jnp.array([options.scale, options.soft_cap or 0.0, options.window or 0], jnp.float32)
    sinks = jnp.full(heads, NO_SINK) if options.sinks is None else options.sinks
    # the kernel multiplies scores by the scale after it has subtracted these, unless there is a cap
    unit = options.scale if options.soft_cap is None else 1.0
    slopes = jnp.zeros(heads) if options.slopes is None else options.slopes / unit
    return jnp.concatenate([first, sinks.astype(jnp.float32), slopes.astype(jnp.float32)])
