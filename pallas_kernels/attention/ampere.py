"""Paged attention as a Pallas Mosaic GPU kernel for Ampere and newer GPUs without kernels of their own.

A block, one warpgroup, processes some queries of a kv head and a share of the tokens that they attend to. It
copies tiles of tokens page by page according to the block table, one tile ahead of the computation: with
cp.async or, from compute capability 9.0 on, where Pallas has no cp.async, with TMA. Each tile is folded into
an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

Products of the tensor cores have 16 rows and 8 columns. The queries are the columns: scores are keys @
queries^T, [tokens, queries], and the result is values^T @ weights, [head_dim, queries]. So decoding, with few
query heads per kv head, wastes little, every warp reads a separate part of the keys and values, and a prompt
tile only has more columns.

A sequence's tiles are divided among splits, so that few long sequences also fill the chip. Each split
computes a softmax over its tiles and returns the result and the log-sum-exp; XLA joins them (Flash-Decoding;
Dao et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import LOG2_E, MASKED, SMALLEST, join, scores
from pallas_kernels.attention.support import GPU_OPTIONS
from pallas_kernels.devices import traced_for
from pallas_kernels.mosaic.ampere import copy, tiled
from pallas_kernels.mosaic.refs import Refs, body
from pallas_kernels.mosaic.versions import store
from pallas_kernels.targets import has_tma

BLOCKS_TO_FILL = 216  # two for each of an A100's 108 multiprocessors
SPLIT_TOKENS = 256  # minimum tokens of a split
STAGES = 2  # tiles of tokens in shared memory
DEPTH = 16  # tokens multiplied at a time: more would need too many registers
# bytes of a row of a shared memory tile: four warps can then share the smallest copies
KV_TILING, Q_TILING = 64, 32


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        q: [items, kv_heads, queries, head_dim], a multiple of the columns of a block.
        k, v: [num_pages, kv_heads, page_size, head_dim].
        tables, positions, lengths: int32 [items, width], [items] and [items].
    """

    q: Any
    k: Any
    v: Any
    tables: Any
    positions: Any
    lengths: Any


class Outputs(NamedTuple):
    """In global memory, for each split, item, kv head and block of queries.

    Attributes:
        out: [..., head_dim, columns].
        lse: float32 [..., columns], base-2 logarithms of softmax sums.
    """

    out: Any
    lse: Any


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        k, v: [STAGES, tile, head_dim].
        p: [tile, columns], weights.
        q: [columns, head_dim].
        tile_landed, q_landed: with TMA, barriers for copies to each stage of k and v, and to q.
    """

    k: Any
    p: Any
    q: Any
    v: Any
    tile_landed: Any = None
    q_landed: Any = None


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        group: query heads per kv head.
        splits: parts of a sequence.
        options: without arrays.
    """

    group: int
    splits: int
    options: AttentionOptions


def default_splits(items: int, kv_heads: int, tokens: int) -> int:
    """Number of splits that fill the chip, if there are enough tokens."""
    return max(1, min(BLOCKS_TO_FILL // (items * kv_heads), tokens // SPLIT_TOKENS))


def shape_of_block(queries: int, head_dim: int) -> tuple[int, int]:
    """Tokens of a tile, and queries of a block, that fit into registers and an L4's shared memory."""
    if queries <= 16 and head_dim <= 128:
        return 64, -(-queries // 8) * 8
    return 32, min(-(-queries // 16) * 16, 64 if head_dim <= 128 else 32)


def paged_attention_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
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
    k_pages: jax.Array,
    v_pages: jax.Array,
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
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype. Contents for tokens that no
            query attends to, NaN included, never affect a result.
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
    items, tile, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    step, columns = shape_of_block(tile * group, head_dim)
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
    scratch = Scratch(
        k=tiled((STAGES, step, head_dim), q.dtype, KV_TILING),
        p=plgpu.SMEM((step, columns), q.dtype) if columns == 8 else tiled((step, columns), q.dtype, 32),
        q=tiled((columns, head_dim), q.dtype, Q_TILING),
        v=tiled((STAGES, step, head_dim), q.dtype, KV_TILING),
    )
    if has_tma(traced_for()):
        copies = 2 * (step // min(page_size, step))  # to a stage
        landed = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
        scratch = scratch._replace(tile_landed=landed, q_landed=plgpu.Barrier())
    out, lse = plgpu.kernel(
        body(_run, Outputs, Form(group, splits, options.static)),
        out_type=(
            jax.ShapeDtypeStruct((*shape, head_dim, columns), result),
            jax.ShapeDtypeStruct((*shape, columns), jnp.float32),
        ),
        scratch_types=[scratch],
        grid=(splits, kv_heads, items * blocks),
        grid_names=("split", "kv_head", "block"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(Inputs(queries, k_pages, v_pages, block_tables, positions, lengths))
    if sinks is not None:  # of each column, a query head
        by_column = jnp.arange(blocks * columns).reshape(blocks, columns) % group
        sinks = sinks.reshape(kv_heads, group)[:, by_column] * LOG2_E
    joined = join(out.swapaxes(-1, -2), lse, sinks).reshape(items, kv_heads, blocks * columns, head_dim)[
        :, :, : tile * group
    ]
    return (
        joined.reshape(items, kv_heads, tile, group, head_dim).swapaxes(1, 2).reshape(q.shape).astype(q.dtype)
    )


def _run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, (out_ref, lse_ref), smem = refs.inputs, refs.outputs, refs.scratch
    group, splits, options, window = form.group, form.splits, form.options, form.options.window
    (tile, columns), tma = smem.p.shape, smem.q_landed is not None
    head_dim, page_size, dtype = smem.q.shape[1], inputs.k.shape[2], smem.q.dtype
    split, kv_head, index = (lax.axis_index(name) for name in ("split", "kv_head", "block"))
    blocks = out_ref.shape[3]
    item, block = lax.div(index, blocks), lax.rem(index, blocks)
    position, length = inputs.positions[item], inputs.lengths[item]

    def query(column: Any) -> Any:  # index in the item of the query in this column
        return lax.div(block * columns + column, group)

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
    per_column = acc_layout.reduce(0)

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def spread(x: Any, rows: int) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (rows, columns), [1]), acc_layout)

    def iota(shape: tuple[int, ...], axis: int) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=acc_layout)

    piece = min(page_size, tile)  # part of a page in one copy
    first_page, last_page = lax.div(first, page_size), lax.div(end - 1, page_size)

    def fetch(i: Any) -> None:
        slot, token = lax.rem(i, STAGES), (start + i) * tile
        for at in range(0, tile, piece):
            page = inputs.tables[item, jnp.clip(lax.div(token + at, page_size), first_page, last_page)]
            for ref, ring in ((inputs.k, smem.k), (inputs.v, smem.v)):
                source = ref.at[page, kv_head, pl.ds(lax.rem(token + at, page_size), piece)]
                landed = smem.tile_landed.at[slot] if tma else None
                copy(source, ring.at[slot, pl.ds(at, piece)], landed)

    # last token that each query attends to
    last_seen = position + jnp.minimum(query(iota((tile, columns), 1)), length - 1)

    def fold(i: Any, carry: Any) -> Any:
        m, total, acc = carry
        slot, token = lax.rem(i, STAGES), (start + i) * tile
        plgpu.barrier_wait(smem.tile_landed.at[slot]) if tma else plgpu.wait_gmem_to_smem(0)
        pl.when(i + 1 < count)(partial(fetch, i + 1))

        @pl.when((token < first) | (token + tile > end))
        def clear() -> None:  # values of other tokens: their weights are zeros, but 0 * NaN is NaN
            v = smem.v.at[slot]
            values = plgpu.load(v, layout=acc_layout)
            tokens = iota(values.shape, 0) + token
            store(v, jnp.where((tokens >= first) & (tokens < end), values, jnp.zeros_like(values)))
            if tma:  # which will write there, too
                plgpu.commit_smem()

        s = filled((tile, columns), 0.0, acc_layout)
        s = plgpu.mma(s, plgpu.load(smem.k.at[slot], layout=lhs), plgpu.load(smem.q.T, layout=rhs))
        tokens = iota(s.shape, 0) + token
        seen = (
            tokens <= last_seen if window is None else (tokens <= last_seen) & (tokens > last_seen - window)
        )
        s, factor = scores(s, options)
        s = jnp.where(seen, s * factor, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=0))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - spread(m_new, tile))
        store(smem.p, p.astype(dtype))
        total = total * spread(alpha, tile) + p
        acc *= spread(alpha, head_dim)
        for at in range(0, tile, DEPTH):
            part = pl.ds(at, DEPTH)
            acc = plgpu.mma(
                acc, plgpu.load(smem.v.at[slot, part].T, layout=lhs), plgpu.load(smem.p.at[part], layout=rhs)
            )
        return m_new, total, acc

    copy(inputs.q.at[item, kv_head, pl.ds(block * columns, columns)], smem.q, smem.q_landed)
    pl.when(count > 0)(partial(fetch, jnp.int32(0)))
    if tma:
        plgpu.barrier_wait(smem.q_landed)
    init = (
        filled((columns,), MASKED, per_column),
        filled((tile, columns), 0.0, acc_layout),
        filled((head_dim, columns), 0.0, acc_layout),
    )
    m, total, acc = lax.fori_loop(0, count, fold, init)
    if not tma:
        plgpu.wait_gmem_to_smem(0)
    total = jnp.maximum(total.sum(axis=0), SMALLEST)
    store(lse_ref.at[split, item, kv_head, block], m + jnp.log2(total))
    store(
        out_ref.at[split, item, kv_head, block], (acc * spread(1.0 / total, head_dim)).astype(out_ref.dtype)
    )
