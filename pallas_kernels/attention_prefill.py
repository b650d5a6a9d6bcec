"""Paged attention for tiles of a prompt, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

The tensor cores take 64 rows a warpgroup. Here the rows are (head, token) pairs: the tokens of a tile for one query head, then for
the next query head of the same kv head, so that a tile of 64 tokens is one head a warpgroup, a tile of 16 four, and no product
is wasted on a full tile. Two compute warpgroups of a block share what its memory warpgroup copies by TMA, page by page as the
block table names them: keys and values come once for 128 rows, so each of their bytes serves 128 multiplications. (Where
a kv head has no more than 64 rows, a block has one compute warpgroup.)

The grid is as large as the device holds at a time. Each block walks over items (tile, kv head, 128 rows), those that see the most keys
first; see `walk`. The memory warpgroup runs ahead over their borders, and queries are fetched as soon as the last product of the item
before has read its own.

Each warpgroup folds blocks of keys into an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). The two take turns:
one's products run while the other is at its exponentials; and a block's scores are multiplied before the values of the block before, so
that these are still multiplied during the exponentials (Shah et al., FlashAttention-3, 2024). A tile visits the keys from
the window's first to its own last real token; positions are compared only in blocks that some row sees in part.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.feed import Blocks, Ring, feed, ring
from pallas_kernels.hopper import COLUMNS, ROWS, accumulate, per_row, product, product_then_accumulate, tiled
from pallas_kernels.quantized import Pages, Quantized, numbers
from pallas_kernels.softmax import LOG2_E, MASKED, SMALLEST, scores
from pallas_kernels.walk import Walk, longest_first

TILE_GRID = 8  # tokens of a tile are a multiple of it
STAGE_BYTES = 1 << 17  # of keys and values in flight in a block
MAX_SHARED, OVERHEAD = 232448, 6400  # bytes that a block may have; that barriers, scales and alignment take of them


def default_block_k(head_dim: int, warpgroups: int, page_size: int, *, eight_bits: bool) -> int:
    """Keys of a stage: as many as registers leave room for; a conversion of eight-bit numbers from more than four pages wants too many."""
    return 128 if warpgroups == 2 and head_dim <= 128 and not (eight_bits and page_size < 32) else 64


def _default_stages(head_dim: int, block_k: int, warpgroups: int, *, eight_bits: bool) -> int:
    """As many as fill STAGE_BYTES, or what queries, results and eight-bit numbers on their way leave of a block's shared memory."""
    stage, raw = 4 * block_k * head_dim, 2 * block_k * head_dim * eight_bits
    beside = 2 * warpgroups * ROWS * (head_dim + _columns(head_dim, eight_bits=eight_bits))
    return min(max(2, STAGE_BYTES * warpgroups // 2 // stage), (MAX_SHARED - OVERHEAD - beside - raw) // stage)


def _columns(head_dim: int, *, eight_bits: bool) -> int:
    """Columns of a result that wait for being stored at a time: all where shared memory has room for them."""
    return min(head_dim, COLUMNS if eight_bits or head_dim == 256 else 128)


def overlaps(head_dim: int, warpgroups: int) -> bool:
    """Whether the registers suffice for scores beside values that are still multiplied. One warpgroup leaves theirs to another block."""
    return warpgroups == 2 and head_dim <= 128


def _registers(page_size: int, *, eight_bits: bool) -> tuple[int, int]:
    """Of a thread that computes, and of one that copies, where two warpgroups compute: a block of these fills a multiprocessor.

    Conversions of many small pages take more of the second.
    """
    return (208, 88) if eight_bits and page_size < 32 else (224, 56)


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
    block_k: int | None = None,
    stages: int | None = None,
    blocks: int | None = None,
    overlap: bool | None = None,
    device: jax.Device | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Tiles of consecutive queries, each of one sequence, causal over the tokens in its pages.

    Args:
        q: bfloat16 or float16 [tiles, tile, heads, head_dim], tile a multiple of 8, head_dim 64, 128 or 256; query head h reads kv
            head h // (heads // kv_heads). The tile's own keys and values are already in the pages.
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or both Quantized alike; page_size 16, 32 or a
            multiple of 64. What they hold for tokens that no query sees, NaN included, never reaches a result.
        block_tables: int32 [tiles, width], page ids in order; read as far as a tile's last real query goes, and some behind its window.
        positions: int32 [tiles], of each tile's first query.
        lengths: int32 [tiles], real queries in each tile; the rest give undefined, finite values. A tile of none reads nothing.
        scale: positive.
        window, soft_cap, sinks: as in `xla.paged_attention_decode`.
        block_k: keys of a stage, a multiple of 64; None chooses by the shapes.
        stages: that are in flight; None fills the shared memory.
        operand_in_registers: the second product takes its left side from registers and adds to what is there. False, which
            is slower, goes through shared memory: the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`.

    Returns:
        [tiles, tile, heads, head_dim], in q's dtype.
    """
    tiles, tile, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    units = -(-(heads // kv_heads) * tile // ROWS)  # warpgroups' shares of a kv head's rows
    warpgroups = min(units, 2)
    shares = -(-units // warpgroups)
    pages = [numbers(x) if isinstance(x, Quantized) else x for x in (k_pages, v_pages)]
    scales = [x.scale for x in (k_pages, v_pages) if isinstance(x, Quantized)]
    block_k = block_k or default_block_k(head_dim, warpgroups, page_size, eight_bits=bool(scales))
    stages = stages or _default_stages(head_dim, block_k, warpgroups, eight_bits=bool(scales))
    overlap = overlaps(head_dim, warpgroups) if overlap is None else overlap
    items = tiles * kv_heads * shares
    walk = Walk(items, min(items, blocks or (tuning.cores(device) if warpgroups == 2 else items)))
    scratch = {
        "k": ring(pages[0], q.dtype, stages, block_k, warpgroups),
        "v": ring(pages[1], q.dtype, stages, block_k, warpgroups),
        "q_smem": tiled((warpgroups, ROWS, head_dim), q.dtype),
        "p_smem": None if operand_in_registers else tiled((warpgroups, ROWS, block_k), q.dtype),
        "out_smem": tiled((warpgroups, ROWS, _columns(head_dim, eight_bits=bool(scales))), q.dtype),
        "q_full": plgpu.Barrier(num_arrivals=ROWS // math.gcd(tile, ROWS), num_barriers=warpgroups),
        "turn": plgpu.Barrier(num_arrivals=2) if warpgroups == 2 else None,
    }
    by_row = []
    if sinks is not None:  # of each (head, token) pair
        rows = jnp.repeat(sinks.reshape(kv_heads, -1) * LOG2_E, tile, axis=1)
        by_row = [jnp.pad(rows, ((0, 0), (0, shares * warpgroups * ROWS - rows.shape[1])))]
    out: jax.Array = plgpu.kernel(
        partial(_kernel, walk=walk, overlap=overlap, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks is not None),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        grid=(walk.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(q, block_tables, longest_first(positions, lengths), *by_row, *pages, *scales)
    return out


class Item(NamedTuple):
    """A tile's queries [position, end) for rows of a kv head, from the `row`-th, and blocks of keys that they see, from the `start`-th."""

    tile: jax.Array
    kv_head: jax.Array
    row: jax.Array
    position: jax.Array
    end: jax.Array
    first: jax.Array
    start: jax.Array
    count: jax.Array


def _kernel(
    q_ref: Any, table_ref: Any, tile_ref: Any, *refs: Any,
    k: Ring, v: Ring, q_smem: Any, p_smem: Any = None, out_smem: Any, q_full: Any, turn: Any = None,
    walk: Walk, overlap: bool, scale: float, window: int | None, soft_cap: float | None, sinks: bool,
) -> None:  # fmt: skip
    sink_ref, refs = (refs[0], refs[1:]) if sinks else (None, refs)
    *cache_refs, out_ref = refs  # pages of keys and of values, and their scales if they are eight-bit numbers
    tiles, tile, heads, head_dim = q_ref.shape
    kv_heads, page_size = cache_refs[0].shape[1:3]
    stages, block_k, _ = k.smem.shape
    warpgroups = q_smem.shape[0]
    compute_registers, memory_registers = _registers(page_size, eight_bits=k.raw is not None)
    group = heads // kv_heads
    rows = group * tile  # (head, token) pairs of a kv head
    shares = walk.items // (tiles * kv_heads)
    piece = math.gcd(tile, ROWS)  # rows of one head that a copy takes
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def item_at(number: jax.Array) -> Item:
        item = walk.item(block, number)
        head = lax.rem(lax.div(item, shares), kv_heads)
        index, position, length = (tile_ref[what, lax.div(item, shares * kv_heads)] for what in range(3))
        end = position + length
        first = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)  # that is seen
        start = lax.div(first, block_k)
        count = jnp.where(length > 0, lax.div(end + block_k - 1, block_k) - start, 0)
        row = (lax.rem(item, shares) * warpgroups + warpgroup) * ROWS
        return Item(index, head, row, position, end, first, start, count)

    def slot_of(number: jax.Array) -> jax.Array:
        # Not the constant 0, or the compiler would keep the address of each scale in a register.
        return lax.rem(number, stages) if stages > 1 else lax.shift_right_logical(number, 31)

    def take_turn() -> None:
        if turn is not None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def place(ref: Any, item: Item, at: int) -> Any:
        of = jnp.minimum(item.row + at, rows - piece)  # rows beyond the last are copied from it, and are not copied back
        return ref.at[item.tile, pl.ds(lax.rem(of, tile), piece), item.kv_head * group + lax.div(of, tile)]

    def fetch_queries(number: jax.Array) -> None:
        @pl.when(number < walk.rounds(block))
        def _() -> None:
            item = item_at(number)

            @pl.when((item.count > 0) & (item.row < rows))
            def _() -> None:
                for at in range(0, ROWS, piece):
                    plgpu.copy_gmem_to_smem(place(q_ref, item, at), q_smem.at[warpgroup, pl.ds(at, piece)], q_full.at[warpgroup])

    def attend(number: jax.Array, item: Item, done: jax.Array) -> None:
        mine = q_smem.at[warpgroup]

        def mask(token: jax.Array, s: jax.Array) -> jax.Array:
            at = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA) + item.row
            at = item.position + lax.rem(at, tile)
            tokens = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + token
            seen = tokens <= jnp.minimum(at, item.end - 1)
            return jnp.where(seen if window is None else seen & (tokens > at - window), s, -jnp.inf)

        def weigh(i: jax.Array, m: jax.Array, total: jax.Array, s: jax.Array) -> Any:
            """The softmax with one more block of scores, its weights, and the factor of what was added up before."""
            slot = slot_of(done + i)
            token = (item.start + i) * block_k
            if k.scale is not None:
                s = s * _along_columns(k.scale.at[slot])
            plgpu.barrier_arrive(k.free.at[slot])
            s, factor = scores(s, scale, soft_cap)
            whole = token + block_k - 1 <= item.position
            if window is not None:
                whole &= token > item.end - 1 - window
            s = lax.cond(whole, lambda s: s, partial(mask, token), s)
            m_new = jnp.maximum(m, s.max(axis=1) * factor)
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s * factor - lax.broadcast_in_dim(m_new, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            plgpu.barrier_wait(v.full.at[slot])
            weights = p if v.scale is None else p * _along_columns(v.scale.at[slot])
            return m_new, total, weights.astype(q_ref.dtype), alpha

        def operand(weights: jax.Array) -> Any:
            if p_smem is None:
                return weights
            p_smem[warpgroup] = weights
            plgpu.commit_smem()
            return p_smem.at[warpgroup]

        def fold(i: jax.Array, carry: Any) -> Any:
            m, total, weights, acc = carry
            slot, last = slot_of(done + i), slot_of(done + i - 1)
            keys, values = k.smem.at[slot].transpose((1, 0)), v.smem.at[last]
            plgpu.barrier_wait(k.full.at[slot])
            if overlap:
                like = m, total, weights, m
                use = partial(weigh, i, m, total)
                (m, total, new, alpha), acc = product_then_accumulate(mine, keys, acc, operand(weights), values, take_turn, use, like)
                plgpu.barrier_arrive(v.free.at[last])
            else:
                acc = accumulate(acc, operand(weights), values)
                plgpu.barrier_arrive(v.free.at[last])
                m, total, new, alpha = weigh(i, m, total, product(mine, keys, take_turn))
            acc = lax.optimization_barrier(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]))
            take_turn()
            return m, total, new, acc

        def then_fetch() -> None:
            take_turn()
            fetch_queries(number + 1)

        def work() -> Any:
            plgpu.barrier_wait(q_full.at[warpgroup])
            slot = slot_of(done)
            plgpu.barrier_wait(k.full.at[slot])
            s = product(mine, k.smem.at[slot].transpose((1, 0)), take_turn)
            m, total, weights, _ = weigh(jnp.int32(0), per_row(MASKED), per_row(0.0), s)
            take_turn()
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)
            m, total, weights, acc = lax.fori_loop(1, item.count, fold, (m, total, weights, zeros))
            last = slot_of(done + item.count - 1)
            acc = accumulate(acc, operand(weights), v.smem.at[last], then_fetch)
            plgpu.barrier_arrive(v.free.at[last])
            if sink_ref is not None:
                of_rows = sink_ref.at[item.kv_head, pl.ds(item.row, ROWS)]
                total += jnp.exp2(plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) - m)
            inverse = 1.0 / jnp.maximum(total, SMALLEST)
            return (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(q_ref.dtype)

        def none() -> Any:
            return plgpu.layout_cast(jnp.zeros((ROWS, head_dim), q_ref.dtype), plgpu.Layout.WGMMA)

        result = lax.cond(item.count > 0, work, none)
        columns = out_smem.shape[-1]
        for column in range(0, head_dim, columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[warpgroup] = result[:, column : column + columns]
            plgpu.commit_smem()
            for at in range(0, ROWS, piece):
                to = place(out_ref, item, at).at[:, pl.ds(column, columns)]
                pl.when(item.row + at < rows)(partial(plgpu.copy_smem_to_gmem, out_smem.at[warpgroup, pl.ds(at, piece)], to))
        pl.when(item.count > 0)(take_turn)

    def idle(number: jax.Array, item: Item, done: jax.Array) -> None:
        """The last of an odd number of warpgroups' shares leaves its neighbour no partner but this."""
        fetch_queries(number + 1)

        @pl.loop(0, item.count)
        def _(i: jax.Array) -> None:
            slot = slot_of(done + i)
            for neighbours in (k, v):
                plgpu.barrier_wait(neighbours.full.at[slot])
                plgpu.barrier_arrive(neighbours.free.at[slot])
                take_turn()

        @pl.when(item.count > 0)
        def last() -> None:
            take_turn()
            take_turn()

    @pl.when(warpgroup < warpgroups)
    def compute() -> None:
        if turn is not None:
            plgpu.set_max_registers(compute_registers, action="increase")
        fetch_queries(jnp.int32(0))
        pl.when(warpgroup == 1)(take_turn)

        def step(number: jax.Array, done: jax.Array) -> jax.Array:
            item = item_at(number)
            pl.when(item.row < rows)(partial(attend, number, item, done))
            if -(-rows // ROWS) % warpgroups:
                pl.when(item.row >= rows)(partial(idle, number, item, done))
            return done + item.count

        lax.fori_loop(0, walk.rounds(block), step, jnp.int32(0))
        pl.when(warpgroup == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(warpgroup == warpgroups)
    def memory() -> None:
        if turn is not None:
            plgpu.set_max_registers(memory_registers, action="decrease")

        def blocks_at(number: jax.Array) -> Blocks:
            item = item_at(number)

            def page(token: jax.Array) -> Any:
                return table_ref[item.tile, lax.div(jnp.minimum(token, item.end - 1), page_size)]

            return Blocks(item.start, item.count, item.first, item.end, page, item.kv_head)

        feed(walk.rounds(block), blocks_at, k, v, *cache_refs)


def _along_columns(x: Any) -> jax.Array:
    """float32 [n] in shared memory as [ROWS, n]."""
    row = plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(row, (ROWS, *row.shape), [1])
