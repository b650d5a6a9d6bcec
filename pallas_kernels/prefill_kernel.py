"""The body of the Hopper kernel for prefill attention; see `attention_prefill`.

Each compute warpgroup folds blocks of keys into an online softmax (Milakov and Gimelshein, 2018; Dao et al.,
2022). The two alternate: one uses the tensor cores while the other computes exponentials. If registers
suffice (`prefill_form`), each also starts the scores of a block before the product with the previous block's
values, which then overlaps the exponentials (Shah et al., FlashAttention-3, 2024). A tile reads keys from the
start of the window to the tile's last real token. Masks are applied only to blocks that are partly visible to
some row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.feed import Blocks, Ring, feed
from pallas_kernels.hopper import ROWS, accumulate, per_row, product, product_then_accumulate
from pallas_kernels.options import AttentionOptions
from pallas_kernels.prefill_form import Form
from pallas_kernels.softmax import MASKED, SMALLEST, scores
from pallas_kernels.walk import Walk


@dataclass(frozen=True)
class Item:
    """A warpgroup's part of an item: rows of a tile and a kv head, and the blocks of keys that they attend
    to.

    Attributes:
        tile, kv_head, row: the tile's index, the kv head, and the first row.
        position, end: the positions of the tile's real tokens are [position, end).
        first: position of the first visible key.
        start, count: the first block of keys, and the number of blocks.
    """

    tile: jax.Array
    kv_head: jax.Array
    row: jax.Array
    position: jax.Array
    end: jax.Array
    first: jax.Array
    start: jax.Array
    count: jax.Array


def run(
    q_ref: Any, table_ref: Any, tile_ref: Any, *refs: Any,
    k: Ring, v: Ring, q_smem: Any, p_smem: Any = None, out_smem: Any, q_full: Any, turn: Any = None,
    walk: Walk, form: Form, options: AttentionOptions, sinks: bool,
) -> None:  # fmt: skip
    sink_ref, refs = (refs[0], refs[1:]) if sinks else (None, refs)
    window = options.window
    *cache_refs, out_ref = refs  # pages of keys and of values, and their scales if they are eight-bit numbers
    _, tile, heads, head_dim = q_ref.shape
    kv_heads, page_size = cache_refs[0].shape[1:3]
    stages, block_k, warpgroups, shares = form.stages, form.block_k, form.warpgroups, form.shares
    group = heads // kv_heads
    rows = group * tile  # (head, token) pairs of a kv head
    piece = math.gcd(tile, ROWS)  # rows of one head per copy
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def item_at(number: jax.Array) -> Item:
        item = walk.item(block, number)
        head = lax.rem(lax.div(item, shares), kv_heads)
        index, position, length = (tile_ref[what, lax.div(item, shares * kv_heads)] for what in range(3))
        end = position + length
        first = jnp.int32(0) if window is None else jnp.maximum(position - window + 1, 0)
        start = lax.div(first, block_k)
        count = jnp.where(length > 0, lax.div(end + block_k - 1, block_k) - start, 0)
        row = (lax.rem(item, shares) * warpgroups + warpgroup) * ROWS
        return Item(index, head, row, position, end, first, start, count)

    def slot_of(number: jax.Array) -> jax.Array:
        # With one stage, a constant 0 would make the compiler keep the address of each scale in a register.
        return lax.rem(number, stages) if stages > 1 else lax.shift_right_logical(number, 31)

    def take_turn() -> None:
        if turn is not None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

    def place(ref: Any, item: Item, at: int) -> Any:
        # rows beyond the last read a valid place, and are not written
        of = jnp.minimum(item.row + at, rows - piece)
        return ref.at[item.tile, pl.ds(lax.rem(of, tile), piece), item.kv_head * group + lax.div(of, tile)]

    def fetch_queries(number: jax.Array) -> None:
        @pl.when(number < walk.rounds(block))
        def _() -> None:
            item = item_at(number)

            @pl.when((item.count > 0) & (item.row < rows))
            def _() -> None:
                for at in range(0, ROWS, piece):
                    plgpu.copy_gmem_to_smem(
                        place(q_ref, item, at), q_smem.at[warpgroup, pl.ds(at, piece)], q_full.at[warpgroup]
                    )

    def attend(number: jax.Array, item: Item, done: jax.Array) -> None:
        mine = q_smem.at[warpgroup]

        def mask(token: jax.Array, s: jax.Array) -> jax.Array:
            at = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA) + item.row
            at = item.position + lax.rem(at, tile)
            tokens = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + token
            seen = tokens <= jnp.minimum(at, item.end - 1)
            return jnp.where(seen if window is None else seen & (tokens > at - window), s, -jnp.inf)

        def weigh(i: jax.Array, m: jax.Array, total: jax.Array, s: jax.Array) -> Any:
            """Folds a block of scores into the softmax. Returns its new state, the block's weights, and the
            factor of earlier sums.
            """
            slot = slot_of(done + i)
            token = (item.start + i) * block_k
            if k.scale is not None:
                s = s * _along_columns(k.scale.at[slot])
            plgpu.barrier_arrive(k.free.at[slot])
            s, factor = scores(s, options)
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
            if form.overlap:
                like = m, total, weights, m
                use = partial(weigh, i, m, total)
                (m, total, new, alpha), acc = product_then_accumulate(
                    mine, keys, acc, operand(weights), values, take_turn, use, like
                )
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
                total += jnp.exp2(
                    plgpu.load(of_rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) - m
                )
            inverse = 1.0 / jnp.maximum(total, SMALLEST)
            return (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(q_ref.dtype)

        def none() -> Any:
            return plgpu.layout_cast(jnp.zeros((ROWS, head_dim), q_ref.dtype), plgpu.Layout.WGMMA)

        result = lax.cond(item.count > 0, work, none)
        for column in range(0, head_dim, form.columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[warpgroup] = result[:, column : column + form.columns]
            plgpu.commit_smem()
            for at in range(0, ROWS, piece):
                to = place(out_ref, item, at).at[:, pl.ds(column, form.columns)]
                pl.when(item.row + at < rows)(
                    partial(plgpu.copy_smem_to_gmem, out_smem.at[warpgroup, pl.ds(at, piece)], to)
                )
        pl.when(item.count > 0)(take_turn)

    def idle(number: jax.Array, item: Item, done: jax.Array) -> None:
        """Keeps the barriers going for the other warpgroup, if this one has no rows: in the last of an odd
        number of 64-row units.
        """
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
            plgpu.set_max_registers(form.registers[0], action="increase")
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
            plgpu.set_max_registers(form.registers[1], action="decrease")

        def blocks_at(number: jax.Array) -> Blocks:
            item = item_at(number)

            def page(token: jax.Array) -> Any:
                return table_ref[item.tile, lax.div(jnp.minimum(token, item.end - 1), page_size)]

            return Blocks(item.start, item.count, item.first, item.end, page, item.kv_head)

        feed(walk.rounds(block), blocks_at, k, v, *cache_refs)


def _along_columns(x: Any) -> jax.Array:
    """Broadcasts float32 [n] in shared memory to [ROWS, n]."""
    row = plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(row, (ROWS, *row.shape), [1])
