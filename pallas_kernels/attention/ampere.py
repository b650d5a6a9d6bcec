"""Paged attention as a Pallas Mosaic GPU kernel for Ampere and newer GPUs without kernels of their own.

A block, one warpgroup, processes some queries of a kv head and a share of the tokens that they attend to. It
copies tiles of tokens page by page according to the block table, one tile ahead of the computation: with
cp.async or, from compute capability 9.0 on, where Pallas has no cp.async, with TMA. Each tile is folded into
an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

Products of the tensor cores have 16 rows and 8 columns. The queries are the columns: scores are keys @
queries^T, [tokens, queries], and the result is values^T @ weights, [head_dim, queries]. So decoding, with few
query heads per kv head, wastes little, every warp reads a separate part of the keys and values, and a prompt
tile only has more columns.

Numbers of an eight-bit cache are copied as stored and converted in registers, each once for all queries of
the block. The keys' scales multiply scores, the values' scales weights, in float32. In latent attention
(DeepSeek-V2, 2024), a value is the first part of its key, so a tile is copied once.

A sequence's tiles are divided among splits, so that few long sequences also fill the chip. Each split
computes a softmax over its tiles and returns the result and the log-sum-exp; XLA joins them (Flash-Decoding;
Dao et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import LOG2_E, MASKED, SMALLEST, join, scores, weight_factor
from pallas_kernels.attention.support import GPU_OPTIONS
from pallas_kernels.devices import traced_for
from pallas_kernels.mosaic.ampere import (
    DEPTH,
    INPUTS,
    NUMBERS,
    ROWS,
    copy,
    gathered,
    in_order,
    left_side,
    right_side,
    tiled,
    transposed,
)
from pallas_kernels.mosaic.refs import Refs, body
from pallas_kernels.mosaic.versions import store
from pallas_kernels.quantization.quantized import Pages, Quantized
from pallas_kernels.targets import has_tma

BLOCKS_TO_FILL = 216  # two for each of an A100's 108 multiprocessors
SPLIT_TOKENS = 256  # minimum tokens of a split
STAGES = 2  # tiles of tokens in shared memory
# maximum bytes of a row of a shared memory tile, and at most half of a token, so that four warps can share
# the smallest copies
KV_TILING, Q_TILING = 64, 32
LARGEST = 256  # maximum channels of a key that are loaded at a time
# tokens of a tile and queries of a block for keys of up to 576 channels; blocks of prompts read half as much
LATENT_ROWS, LATENT_PROMPTS = (32, 16), (16, 32)


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        q: [items, kv_heads, queries, head_dim], a multiple of the columns of a block.
        k, v: [num_pages, kv_heads, page_size, head_dim]; no v: values are the first channels of their keys.
        tables, positions, lengths: int32 [items, width], [items] and [items].
        k_scale, v_scale: of an eight-bit cache, float32 [num_pages, kv_heads or more, page_size].
    """

    q: Any
    k: Any
    v: Any
    tables: Any
    positions: Any
    lengths: Any
    k_scale: Any = None
    v_scale: Any = None


class Outputs(NamedTuple):
    """In global memory, for each split, item, kv head and block of queries.

    Attributes:
        out: [..., channels of a value, columns]; of an eight-bit cache, in the order of `transposed`.
        lse: float32 [..., columns], base-2 logarithms of softmax sums.
    """

    out: Any
    lse: Any


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        k, v: [STAGES, tile, head_dim]; v: None for latent attention.
        p: [tile, columns], weights.
        q: [columns, head_dim].
        tile_landed, q_landed: with TMA, barriers for copies to each stage of k and v, and to q.
    """

    k: Any
    p: Any
    q: Any
    v: Any = None
    tile_landed: Any = None
    q_landed: Any = None


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        group: query heads per kv head.
        splits: parts of a sequence.
        options: without arrays.
        kind: of the numbers of an eight-bit cache; "" for others.
    """

    group: int
    splits: int
    options: AttentionOptions
    kind: str


def default_splits(items: int, kv_heads: int, tokens: int) -> int:
    """Number of splits that fill the chip, if there are enough tokens."""
    return max(1, min(BLOCKS_TO_FILL // (items * kv_heads), tokens // SPLIT_TOKENS))


def shape_of_block(queries: int, head_dim: int, eight_bits: bool) -> tuple[int, int]:
    """Tokens of a tile, and queries of a block, that fit into registers and an L4's shared memory."""
    if queries <= 16 and (eight_bits or head_dim <= 128):
        return 64, -(-queries // 8) * 8
    limit = 64 if head_dim <= (64 if eight_bits else 128) else 32
    return ROWS if eight_bits else 32, min(-(-queries // 16) * 16, limit)


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    splits: int | None = None,
) -> jax.Array:
    """`dispatch.paged_attention_decode` on Ampere and Ada."""
    tiles, real = q[:, None], jnp.minimum(lengths, 1)
    where = block_tables, lengths - 1, real
    return paged_attention_prefill(tiles, k_pages, v_pages, *where, options, splits=splits)[:, 0]


def paged_attention_prefill(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    splits: int | None = None,
) -> jax.Array:
    """Tiles of consecutive queries, each of one sequence, causal over the tokens in its pages.

    Args:
        q: bfloat16 or float16 [tiles, tile, heads, head_dim]; query head h reads kv head h // (heads //
            kv_heads).
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or Quantized to int8 or to
            the bits of float8_e4m3fn. Contents for tokens that no query attends to, NaN included, never
            affect a result.
        block_tables: int32 [tiles, width], page ids in order; read for tokens that a tile's queries attend
            to.
        positions: int32 [tiles], of each tile's first query.
        lengths: int32 [tiles], real queries in each tile; the rest give undefined, finite values.
        options: without slopes.
        splits: number of parts of a sequence that blocks process in parallel; None: chosen by the shapes.

    Returns:
        [tiles, tile, heads, head_dim], in q's dtype.
    """
    options.require(*GPU_OPTIONS)
    pages, where = (k_pages, v_pages), (block_tables, positions, lengths)
    eight_bits = isinstance(k_pages, Quantized)
    block = shape_of_block(q.shape[1] * q.shape[2] // k_pages.shape[1], q.shape[3], eight_bits)
    return _attend(q, pages, *where, options, splits, block, q.shape[3])


def latent_attention_decode(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    splits: int | None = None,
) -> jax.Array:
    """`latent.latent_attention_decode` on Ampere and Ada."""
    where = block_tables, lengths - 1, jnp.minimum(lengths, 1)
    return latent_attention_prefill(q[:, None], pages, *where, options, rank=rank, splits=splits)[:, 0]


def latent_attention_prefill(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    splits: int | None = None,
) -> jax.Array:
    """`latent.latent_attention_prefill` on Ampere and Ada.

    Args:
        q: bfloat16 or float16 [tiles, tile, heads, key_dim], at most 576 channels.
        pages: [num_pages, 1, page_size, key_dim] in q's dtype.
        splits: as in `paged_attention_prefill`.
    """
    options.require(*GPU_OPTIONS)
    where, block = (block_tables, positions, lengths), LATENT_ROWS if q.shape[1] == 1 else LATENT_PROMPTS
    return _attend(q, (pages,), *where, options, splits, block, rank)


def _attend(
    q: jax.Array,
    pages: Sequence[Pages],
    block_tables: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    splits: int | None,
    block: tuple[int, int],
    channels: int,
) -> jax.Array:
    """Attention to pages of keys and of values; without the latter, values are the first `channels` of their
    keys. block: tokens of a tile and queries of a block.
    """
    items, tile, heads, head_dim = q.shape
    kv_heads, page_size = pages[0].shape[1:3]
    group = heads // kv_heads
    kind = pages[0].kind if isinstance(pages[0], Quantized) else ""
    scales = [x.scale for x in pages if isinstance(x, Quantized)]
    k, *values = [x.values if isinstance(x, Quantized) else x for x in pages]
    v = values[0] if values else None
    step, columns = block
    blocks = -(-tile * group // columns)
    tokens = block_tables.shape[1] * page_size
    read = tokens if options.window is None else min(options.window + tile, tokens)
    splits, sinks = splits or default_splits(items * blocks, kv_heads, read), options.sinks
    queries = (
        q.reshape(items, tile, kv_heads, group, head_dim)
        .swapaxes(1, 2)
        .reshape(items, kv_heads, tile * group, head_dim)
    )
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, blocks * columns - tile * group), (0, 0)))

    shape = (splits, items, kv_heads, blocks)
    result = q.dtype if splits == 1 and sinks is None else jnp.dtype("float32")
    tiles = tiled((STAGES, step, head_dim), k.dtype, _size(k))
    scratch = Scratch(
        k=tiles,
        p=plgpu.SMEM((step, columns), q.dtype) if columns == 8 else tiled((step, columns), q.dtype, 32),
        q=tiled((columns, head_dim), q.dtype, Q_TILING),
        v=None if v is None else tiles,
    )
    if has_tma(traced_for()):
        copies = len(pages) * (step // min(page_size, step))  # to a stage
        landed = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
        scratch = scratch._replace(tile_landed=landed, q_landed=plgpu.Barrier())
    out, lse = plgpu.kernel(
        body(_run, Outputs, Form(group, splits, options.static, kind)),
        out_type=(
            jax.ShapeDtypeStruct((*shape, channels, columns), result),
            jax.ShapeDtypeStruct((*shape, columns), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(splits, kv_heads, items * blocks),
        grid_names=("split", "kv_head", "block"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(Inputs(queries, k, v, block_tables, positions, lengths, *scales))
    if sinks is not None:  # of each column, a query head
        by_column = jnp.arange(blocks * columns).reshape(blocks, columns) % group
        sinks = sinks.reshape(kv_heads, group)[:, by_column] * LOG2_E
    out = out.swapaxes(-1, -2)
    joined = join(in_order(out) if kind else out, lse, sinks)
    joined = joined.reshape(items, kv_heads, blocks * columns, channels)[:, :, : tile * group]
    by_head = joined.reshape(items, kv_heads, tile, group, channels).swapaxes(1, 2)
    return by_head.reshape(*q.shape[:-1], channels).astype(q.dtype)


def _size(pages: Any) -> int:
    """Bytes of a row of tiles of keys and values in shared memory."""
    half_a_token: int = pages.shape[-1] * pages.dtype.itemsize // 2
    return min(KV_TILING, half_a_token)


def _run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, (out_ref, lse_ref), smem = refs.inputs, refs.outputs, refs.scratch
    splits, options, window, kind = form.splits, form.options, form.options.window, form.kind
    (tile, columns), tma = smem.p.shape, smem.q_landed is not None
    head_dim, page_size, dtype = smem.q.shape[1], inputs.k.shape[2], smem.q.dtype
    rings = [(inputs.k, smem.k), (inputs.v, smem.v)][: 1 if smem.v is None else 2]
    channels, v_ring = out_ref.shape[4], rings[-1][1]
    split, kv_head, index = (lax.axis_index(name) for name in ("split", "kv_head", "block"))
    blocks = out_ref.shape[3]
    item, block = lax.div(index, blocks), lax.rem(index, blocks)
    position, length = inputs.positions[item], inputs.lengths[item]

    def query(column: Any) -> Any:  # index in the item of the query in this column
        return lax.div(block * columns + column, form.group)

    # Only tokens in [first, end) are attended to by some query of the block.
    last = position + jnp.minimum(query(columns - 1), length - 1)
    end = jnp.where(query(0) < length, last + 1, 0)
    first = jnp.int32(0) if window is None else jnp.clip(position + query(0) - window + 1, 0, end)
    first_tile, end_tile = lax.div(first, tile), lax.div(end + tile - 1, tile)
    share = lax.div(end_tile - first_tile + splits - 1, splits)
    start = jnp.minimum(first_tile + split * share, end_tile)
    count = jnp.minimum(share, end_tile - start)

    lhs, rhs, acc_layout = (
        layout(dtype, m_warps=tile // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    per_token, per_column = acc_layout.reduce(1), acc_layout.reduce(0)

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: Any, rows: int, axis: int = 1) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, columns), [axis]), acc_layout)

    def iota(shape: tuple[int, ...], axis: int, layout: Any = acc_layout) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)

    width = head_dim if head_dim <= LARGEST else ROWS
    parts = [pl.ds(at, width) for at in range(0, head_dim, width)]  # of keys
    piece = min(page_size, tile)  # part of a page in one copy
    first_page, last_page = lax.div(first, page_size), lax.div(end - 1, page_size)

    def fetch(i: Any) -> None:
        slot, token = lax.rem(i, STAGES), (start + i) * tile
        for at in range(0, tile, piece):
            page = inputs.tables[item, jnp.clip(lax.div(token + at, page_size), first_page, last_page)]
            for ref, ring in rings:
                source = ref.at[page, kv_head, pl.ds(lax.rem(token + at, page_size), piece)]
                landed = smem.tile_landed.at[slot] if tma else None
                copy(source, ring.at[slot, pl.ds(at, piece)], landed)

    def scales(i: Any) -> list[Any]:
        """Scales of the keys and values of a tile, zeros for tokens that no query attends to."""
        if not kind:
            return []
        token = iota((tile,), 0, per_token) + (start + i) * tile
        used, number = (token >= first) & (token < end), lax.div(token, page_size)
        entry = jnp.minimum(jnp.maximum(number, first_page), last_page)
        page = gathered(inputs.tables, item, entry, per_token)
        line = jnp.where(used, page * inputs.k_scale.shape[1] + kv_head, 0)
        of_page = token - number * page_size
        return [
            jnp.where(used, gathered(ref, line, of_page, per_token), 0.0)
            for ref in (inputs.k_scale, inputs.v_scale)
        ]

    def products_of_keys(slot: Any) -> Any:
        s = filled((tile, columns), 0.0, acc_layout)
        if not kind:
            for part in parts:
                k = plgpu.load(smem.k.at[slot, :, part], layout=lhs)
                s = plgpu.mma(s, k, plgpu.load(smem.q.at[:, part].T, layout=rhs))
            return s
        numbers = plgpu.load(smem.k.at[slot], layout=NUMBERS, optimized=False)
        for step in range(head_dim // DEPTH):
            q = plgpu.load(smem.q.at[:, pl.ds(step * DEPTH, DEPTH)], layout=INPUTS, optimized=False)
            s = plgpu.mma(s, left_side(numbers, step, kind, dtype), right_side(q, eight_bits=True))
        return s

    def values(slot: Any, part: Any) -> Any:
        ref = v_ring.at[slot, part, pl.ds(0, channels)]
        return transposed(ref, _size(ref), kind, dtype) if kind else plgpu.load(ref.T, layout=lhs)

    enlarged = weight_factor(dtype, scaled=bool(kind))
    # last token that each query attends to
    last_seen = position + jnp.minimum(query(iota((tile, columns), 1)), length - 1)

    def fold(i: Any, carry: Any) -> Any:
        m, total, acc, factors = carry
        slot, token = lax.rem(i, STAGES), (start + i) * tile
        plgpu.barrier_wait(smem.tile_landed.at[slot]) if tma else plgpu.wait_gmem_to_smem(0)
        pl.when(i + 1 < count)(partial(fetch, i + 1))
        following = scales(i + 1)

        def clear() -> None:  # values of other tokens: their weights are zeros, but 0 * NaN is NaN
            for part in parts:
                v = v_ring.at[slot, :, part]
                values = plgpu.load(v, layout=acc_layout)
                tokens = iota(values.shape, 0) + token
                store(v, jnp.where((tokens >= first) & (tokens < end), values, jnp.zeros_like(values)))
            if tma:  # which will write there, too
                plgpu.commit_smem()

        if not kind:  # eight bits become finite numbers, whatever they are
            pl.when((token < first) | (token + tile > end))(clear)
        s = products_of_keys(slot)
        if kind:
            s *= spread(factors[0], tile, 0)
        tokens = iota(s.shape, 0) + token
        seen = (
            tokens <= last_seen if window is None else (tokens <= last_seen) & (tokens > last_seen - window)
        )
        s, factor = scores(s, options)
        s = jnp.where(seen, s * factor, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=0))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - spread(m_new, tile))
        store(smem.p, (p * spread(factors[1] * enlarged, tile, 0) if kind else p).astype(dtype))
        total = total * spread(alpha, tile) + p
        acc *= spread(alpha, channels)
        for at in range(0, tile, DEPTH):
            part = pl.ds(at, DEPTH)
            acc = plgpu.mma(acc, values(slot, part), plgpu.load(smem.p.at[part], layout=rhs))
        return m_new, total, acc, following

    copy(inputs.q.at[item, kv_head, pl.ds(block * columns, columns)], smem.q, smem.q_landed)
    pl.when(count > 0)(partial(fetch, jnp.int32(0)))
    if tma:
        plgpu.barrier_wait(smem.q_landed)
    init = (
        filled((columns,), MASKED, per_column),
        filled((tile, columns), 0.0, acc_layout),
        filled((channels, columns), 0.0, acc_layout),
        scales(jnp.int32(0)),
    )
    m, total, acc, _ = lax.fori_loop(0, count, fold, init)
    if not tma:
        plgpu.wait_gmem_to_smem(0)
    total = jnp.maximum(total.sum(axis=0), SMALLEST)
    store(lse_ref.at[split, item, kv_head, block], m + jnp.log2(total))
    store(
        out_ref.at[split, item, kv_head, block],
        (acc * spread(1.0 / enlarged / total, channels)).astype(out_ref.dtype),
    )
