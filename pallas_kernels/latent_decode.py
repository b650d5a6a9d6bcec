"""Latent attention for one query per sequence (DeepSeek-V2, 2024), as a Pallas Mosaic GPU kernel for Hopper
(sm_90a).

All query heads read one cached vector per token, of `rank` channels and some that carry its position. The
vector is the key of every head, and its first `rank` channels are the value. So a thread block copies each
token once, for all of its heads, and the tensor cores' 64 rows hold up to 64 heads.

Persistent thread blocks, one per multiprocessor, process the items of a work list (`work_list.py`): tiles of
64 tokens of a (row, block of up to 64 heads) pair. The plan for rank 512 and 64 channels of position, in 16
bits:

- The result of 64 heads, 64 x 512 float32, is half of the register file. Two warpgroups keep half of its
columns
  each: 128 registers per thread. Scores and weights need about 50 more, so each thread has 224, and each of a
  third warpgroup, which copies, 56.
- Shared memory of 227 KiB holds the queries (72 KiB), two tiles (144 KiB) and the weights of a tile (8 KiB).
- The first warpgroup computes a tile's scores, folds them into an online softmax (Milakov and Gimelshein,
2018; Dao
  et al., 2022) and writes the weights to shared memory, with the factor that scales earlier sums. Then both
  multiply the weights by their half of the values. The second may still multiply while the first computes the
  next scores.
- A tile's products are as many as 68 of m64n64k16, or 1.2 us of a multiprocessor's tensor cores on an H200;
its softmax,
  which they wait for, takes about 0.3 us. Its copy takes 2.0 us, if all multiprocessors share the memory's
  bandwidth. So memory is the limit up to 64 heads per device. With more heads, each tile is copied once for
  every 64 heads, at best from the L2 cache, and the tensor cores are the limit. These are estimates: the
  kernel has not run on a GPU.
- The item's results leave through the queries' shared memory, which is free after the last scores.

The memory warpgroup copies tiles by TMA, page by page. It clears the values of tokens beyond the sequence,
since 0 * NaN is NaN. The first warpgroup joins the parts of pairs that the work list splits, after the
block's own items (`attention_join.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.attention_join import Join, join
from pallas_kernels.decode_feed import Item
from pallas_kernels.hopper import COLUMNS, ROWS, per_row, product, tiled
from pallas_kernels.options import AttentionOptions
from pallas_kernels.semaphores import signal
from pallas_kernels.softmax import LOG2_E, MASKED, SMALLEST
from pallas_kernels.versions import store
from pallas_kernels.work_list import TILE, WorkList, even_work

HALVES = 2  # compute warpgroups; each keeps this part of the result's columns
STAGES = 2  # tiles in flight
REGISTERS = 224, 56  # per compute thread and per memory thread
RANKS = 128, 256, 384, 512  # channels of a value: of each half, whole tiles of shared memory
KEY_CHANNELS = COLUMNS  # a key has a multiple of these; up to as many more than the largest rank fit


def latent_attention_decode(
    q: jax.Array,
    pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    rank: int,
    work: WorkList | None = None,
    device: jax.Device | None = None,
    in_place: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Attends from one query per sequence to all tokens of the sequence.

    `latent_dispatch.why_latent_decode_unsupported` gives the supported shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, key_dim].
        pages: [num_pages, 1, page_size, key_dim] in q's dtype; a value is the first `rank` channels of its
            key. Contents for tokens that no query sees do not affect results, even if they are NaN.
        block_tables: int32 [rows, width], page ids in order.
        lengths: int32 [rows], tokens of each sequence including the query's, at most width * page_size; 0
            gives zeros.
        options: only a scale.
        work: from `latent_work`, for these lengths and heads; None creates one. Many layers can share a list.
        device: the device that this will run on, for its limits; None: an H100 or H200.
        in_place: products add to their accumulators in place. Pallas interprets only the other form, which
            adds afterwards.
        interpret: as in `plgpu.kernel`.

    Returns:
        [rows, heads, rank], in q's dtype.
    """
    options.require()
    rows, heads, key_dim = q.shape
    blocks, group = head_blocks(heads)
    padded = blocks * group
    if padded > heads:
        q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    work = latent_work(heads, lengths, device=device) if work is None else work
    signals = jax.new_ref(work.signals) if isinstance(work.signals, jax.Array) else work.signals
    half = rank // HALVES
    copies = TILE // min(pages.shape[2], TILE)
    out, *_ = plgpu.kernel(
        partial(_kernel, scale=options.scale, group=group, rank=rank, in_place=in_place),
        out_type=(
            jax.ShapeDtypeStruct((rows, padded, rank), q.dtype),
            jax.ShapeDtypeStruct((work.slots, group, rank), jnp.float32),
            jax.ShapeDtypeStruct((work.slots, ROWS), jnp.float32),
        ),
        scratch_types={
            "shared": plgpu.RefUnion(
                tiled((ROWS, key_dim), q.dtype),
                tiled((HALVES, ROWS, half), q.dtype),
                tiled((HALVES, ROWS, half // 2), jnp.dtype(jnp.float32), 16),
                tiled((rank // COLUMNS, ROWS, COLUMNS), q.dtype),
            ),
            "tiles": tiled((STAGES, TILE, key_dim), q.dtype),
            "weights": tiled((ROWS, TILE), q.dtype),
            "factors": plgpu.SMEM((ROWS,), jnp.float32),
            "q_full": plgpu.Barrier(),
            # the last: for tiles that are cleared first
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES + 1),
            "free": plgpu.Barrier(num_arrivals=HALVES, num_barriers=STAGES),
            "given": plgpu.Barrier(),
            "taken": plgpu.Barrier(),
        },
        grid=(work.blocks,),
        grid_names=("block",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        kernel_name="latent_attention_decode",
        # all reductions are within warps
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, pages, block_tables, lengths, work.first, work.items, work.joins, signals)
    result: jax.Array = out[:, :heads]
    return result


def head_blocks(heads: int) -> tuple[int, int]:
    """The number of blocks of heads, and heads of a block. TMA copies whole tiles of shared memory, 8 rows
    each.
    """
    blocks = -(-heads // ROWS)
    return blocks, -(-heads // (8 * blocks)) * 8


def latent_work(heads: int, lengths: jax.Array, *, device: jax.Device | None = None) -> WorkList:
    """The work list of `latent_attention_decode` for all layers with this many query heads and these
    lengths.
    """
    return even_work(lengths, head_blocks(heads)[0], blocks=tuning.cores(device))


def _kernel(
    q_ref: Any, page_ref: Any, table_ref: Any, length_ref: Any, first_ref: Any, item_ref: Any, join_ref: Any, signal_ref: Any,
    out_ref: Any, part_ref: Any, sum_ref: Any, *,
    shared: Any, tiles: Any, weights: Any, factors: Any, q_full: Any, full: Any, free: Any, given: Any, taken: Any,
    scale: float, group: int, rank: int, in_place: bool,
) -> None:  # fmt: skip
    queries, results, part_results, joined = shared
    rows, heads, _ = q_ref.shape
    half = rank // HALVES
    block, blocks, warpgroup = lax.axis_index("block"), first_ref.shape[0] - 1, lax.axis_index("warpgroup")

    def bounds() -> tuple[jax.Array, jax.Array]:
        """The block's items. Each warpgroup reads them itself: registers that all share would be spilled."""
        return first_ref[block, 0], first_ref[block + 1, 0]

    def add(acc: jax.Array, values: Any) -> jax.Array:
        """acc + weights @ values."""
        if not in_place:
            return acc + product(weights, values)
        total: jax.Array = pl.run_state(lambda out: plgpu.wgmma(out, weights, values))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )
        return total

    def scaled(acc: jax.Array, factor: jax.Array) -> jax.Array:
        return acc * lax.broadcast_in_dim(factor, acc.shape, [0])

    def nothing() -> jax.Array:
        zeros: jax.Array = plgpu.layout_cast(jnp.zeros((ROWS, half), jnp.float32), plgpu.Layout.WGMMA)
        return zeros

    def columns(which: int, at: int = 0, count: int = half) -> Any:
        return pl.ds(which * half + at, count)

    def heads_of(item: Item | Join) -> Any:
        return pl.ds(item.kv_head * group, group)

    def put(which: int, item: Item, acc: jax.Array) -> None:
        """Stores a warpgroup's half of normalized results."""

        @pl.when(item.slot < 0)
        def whole() -> None:
            results[which] = acc.astype(q_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                results.at[which, pl.ds(0, group)], out_ref.at[item.row, heads_of(item), columns(which)]
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(item.slot >= 0)
        def part() -> None:
            for at in range(0, half, half // 2):
                part_results[which] = acc[:, at : at + half // 2]
                plgpu.commit_smem()
                to = part_ref.at[item.slot, :, columns(which, at, half // 2)]
                plgpu.copy_smem_to_gmem(part_results.at[which, pl.ds(0, group)], to)
                plgpu.wait_smem_to_gmem(0)  # before the join

    def clear(turn: jax.Array) -> None:
        """Writes zeros for a row without a sequence."""
        row = block + turn * blocks

        @pl.when((row < rows) & (length_ref[jnp.minimum(row, rows - 1)] == 0))
        def _() -> None:
            results[0] = nothing().astype(q_ref.dtype)
            plgpu.commit_smem()
            for at in range(0, heads, group):
                for which in range(HALVES):
                    plgpu.copy_smem_to_gmem(
                        results.at[0, pl.ds(0, group)], out_ref.at[row, pl.ds(at, group), columns(which)]
                    )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def join_pair(index: jax.Array) -> None:
        pair = Join.read(join_ref, index)

        @pl.when(pair.parts > 0)
        def _() -> None:
            join(
                pair,
                signal_ref.at[index],
                part_ref,
                sum_ref,
                joined,
                out_ref.at[pair.row, heads_of(pair)],
                [],
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def give(number: jax.Array, factor: jax.Array, p: jax.Array | None = None) -> None:
        """Passes a factor of earlier sums, and a tile's weights, to the second warpgroup, once it has taken
        those before.
        """
        pl.when(number > 0)(partial(plgpu.barrier_wait, taken))
        store(factors, factor)
        if p is not None:
            weights[...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(given)

    @pl.when(warpgroup == HALVES)
    def memory() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _feed(page_ref, table_ref, item_ref, tiles, full, free, *bounds(), rank)

    @pl.when(warpgroup == 1)
    def follow() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        first, end = bounds()

        def attend(index: jax.Array, done: jax.Array) -> jax.Array:
            item = Item.read(item_ref, index)

            def take() -> jax.Array:
                plgpu.barrier_wait(given)
                factor: jax.Array = plgpu.load(factors, layout=plgpu.Layout.WGMMA.reduce(1))
                return factor

            def fold(tile: jax.Array, acc: jax.Array) -> jax.Array:
                slot = lax.rem(done + tile, STAGES)
                acc = add(scaled(acc, take()), tiles.at[slot, :, columns(1)])
                plgpu.barrier_arrive(taken)
                plgpu.barrier_arrive(free.at[slot])
                return acc

            acc = lax.fori_loop(0, item.tiles, fold, nothing())
            put(1, item, scaled(acc, take()))
            plgpu.barrier_arrive(taken)
            return done + item.tiles

        lax.fori_loop(first, end, attend, jnp.int32(0))

    @pl.when(warpgroup == 0)
    def score() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        first, end = bounds()

        def attend(index: jax.Array, done: jax.Array) -> jax.Array:
            item = Item.read(item_ref, index)
            plgpu.copy_gmem_to_smem(q_ref.at[item.row, heads_of(item)], queries.at[pl.ds(0, group)], q_full)
            plgpu.barrier_wait(q_full)
            left = item.length - item.start * TILE  # tokens from the first tile on

            def fold(tile: jax.Array, carry: Any) -> Any:
                m, total, acc = carry
                slot = lax.rem(done + tile, STAGES)
                plgpu.barrier_wait(full.at[slot])
                s = product(queries, tiles.at[slot].transpose((1, 0)))
                tokens = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)
                s = jnp.where(tokens < left - tile * TILE, s * (scale * LOG2_E), -jnp.inf)
                m_new = jnp.maximum(m, s.max(axis=1))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
                total = total * alpha + p.sum(axis=1)
                give(tile, alpha, p.astype(q_ref.dtype))
                acc = add(scaled(acc, alpha), tiles.at[slot, :, columns(0)])
                plgpu.barrier_arrive(free.at[slot])
                return m_new, total, acc

            m, total, acc = lax.fori_loop(0, item.tiles, fold, (per_row(MASKED), per_row(0.0), nothing()))
            total = jnp.maximum(total, SMALLEST)
            inverse = 1.0 / total
            give(item.tiles, inverse)
            item = Item.read(item_ref, index)  # read again: keeping it during the loop would take registers
            pl.when(item.slot >= 0)(lambda: store(sum_ref.at[item.slot], m + jnp.log2(total)))
            put(0, item, scaled(acc, inverse))
            plgpu.barrier_wait(taken)  # the second warpgroup's results have left the queries' memory
            pl.when(item.join >= 0)(lambda: signal(signal_ref.at[item.join]))
            return done + item.tiles

        lax.fori_loop(first, end, attend, jnp.int32(0))
        pl.loop(0, pl.cdiv(rows, blocks))(clear)
        pl.loop(first_ref[block, 1], first_ref[block + 1, 1])(join_pair)


def _feed(
    page_ref: Any,
    table_ref: Any,
    item_ref: Any,
    tiles: Any,
    full: Any,
    free: Any,
    first: jax.Array,
    end: jax.Array,
    rank: int,
) -> None:
    """Copies all tiles of the items. Returns when every slot is free again, so that every barrier phase is
    observed.
    """
    page_size = page_ref.shape[2]
    piece = min(page_size, TILE)  # tokens per copy

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item.read(item_ref, index)
        last = lax.div(item.length - 1, page_size)

        @pl.loop(0, item.tiles)
        def one_tile(tile: jax.Array) -> None:
            number, token = done + tile, (item.start + tile) * TILE
            slot, whole = lax.rem(number, STAGES), token + TILE <= item.length
            ids = [
                table_ref[item.row, jnp.minimum(lax.div(token + at, page_size), last)]
                for at in range(0, TILE, piece)
            ]
            pl.when(number >= STAGES)(partial(plgpu.barrier_wait, free.at[slot]))
            for at, page in zip(range(0, TILE, piece), ids, strict=True):
                source = page_ref.at[
                    page, 0, pl.ds(lax.rem(token, page_size) if page_size > TILE else 0, piece)
                ]
                plgpu.copy_gmem_to_smem(
                    source, tiles.at[slot, pl.ds(at, piece)], full.at[jnp.where(whole, slot, STAGES)]
                )

            @pl.when(jnp.logical_not(whole))
            def clear() -> None:
                plgpu.barrier_wait(full.at[STAGES])
                tokens = plgpu.broadcasted_iota(jnp.int32, (TILE, COLUMNS), 0, layout=plgpu.Layout.WGMMA)

                @pl.loop(0, rank // COLUMNS)
                def some(i: jax.Array) -> None:
                    values = tiles.at[slot, :, pl.ds(i * COLUMNS, COLUMNS)]
                    loaded = plgpu.load(values, layout=plgpu.Layout.WGMMA)
                    values[...] = jnp.where(tokens < item.length - token, loaded, jnp.zeros_like(loaded))

                plgpu.commit_smem()
                for _ in ids:
                    plgpu.barrier_arrive(full.at[slot])

        return done + item.tiles

    done = lax.fori_loop(first, end, one_item, jnp.int32(0))

    for slot in range(STAGES):
        pl.when(slot < done)(partial(plgpu.barrier_wait, free.at[slot]))
