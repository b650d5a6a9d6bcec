"""Paged attention for one query per sequence, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

Persistent thread blocks, as many as the GPU holds at a time, process the items of a work list: tiles of 64
tokens of a (row, kv head) pair. A block's memory warpgroup copies the tiles by TMA, page by page, as the
block table lists them. Its compute warpgroup folds each tile into an online softmax (Milakov and Gimelshein,
2018; Dao et al., 2022). The tensor cores multiply 64 queries at a time. The query heads of a kv head are the
first of them; results of the others are discarded. This wastes arithmetic but no memory bandwidth, which
limits decoding.

If the work list splits a pair, each part's result and the logarithm of its softmax sum are stored, and the
block with the last part joins them (Flash-Decoding; Dao et al., 2023; `attention_join`). That block waits for
blocks with smaller indices, which the hardware starts first; so the kernel ends even if not all blocks run at
the same time. Scales of an eight-bit cache multiply scores and weights in float32.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import tuning
from pallas_kernels.attention_join import Join, join
from pallas_kernels.decode_feed import Feed, Item, Side, ring_of, seen
from pallas_kernels.hopper import (
    COLUMNS,
    ROWS,
    accumulate,
    copy_rows_out,
    per_row,
    product,
    rows_by_warp,
    tiled,
)
from pallas_kernels.options import AttentionOptions
from pallas_kernels.quantized import Pages, Quantized
from pallas_kernels.semaphores import signal
from pallas_kernels.softmax import LOG2_E, MASKED, SMALLEST, scores
from pallas_kernels.support import GPU_OPTIONS
from pallas_kernels.tuning import BLOCKS, DecodeCase, DecodeChoice
from pallas_kernels.versions import store
from pallas_kernels.work_list import TILE, WorkList, even_work

QUERIES = ROWS  # maximum query heads per kv head
# per compute thread and per memory thread, if two pairs of warpgroups share a multiprocessor
REGISTERS = 152, 104


def paged_attention_decode(
    q: jax.Array,
    k_pages: Pages,
    v_pages: Pages,
    block_tables: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    *,
    work: WorkList | None = None,
    choice: DecodeChoice | None = None,
    device: jax.Device | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Attends from one query per sequence to all tokens of the sequence.

    `dispatch.why_decode_unsupported` gives the supported shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or Quantized to int8 or to
            the bits of float8_e4m3fn. Contents for tokens that no query sees do not affect results, even if
            they are NaN.
        block_tables: int32 [rows, width], page ids in order. Entries are read up to a row's length, including
            some before its window.
        lengths: int32 [rows], tokens of each sequence including the query's, at most width * page_size; 0
            gives zeros.
        options: without slopes.
        work: a work list for these lengths and kv heads, and for this window or a larger one; None creates
            one. Many layers can share a list, best one that is `shared`.
        choice: the number of tiles in flight per block, at least 2; None uses `tuning.decode`.
        device: the device that this will run on, for its limits; None: an H100 or H200.
        operand_in_registers: the second product reads its left operand from registers and accumulates in
            place. False goes through shared memory, which is slower but the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`. Pallas interprets no semaphores: with `inline_mgpu="ignore"`, it
            interprets the kernel for work lists that split no pair.

    Returns:
        [rows, heads, head_dim], in q's dtype.
    """
    options.require(*GPU_OPTIONS)
    rows, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    padded = -(-group // 8) * 8  # TMA copies whole tiles of shared memory
    stored = k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype
    if work is None:
        blocks = tuning.decode_blocks(str(stored), head_dim, device)
        work = even_work(lengths, kv_heads, blocks=blocks, window=options.window)
    case = DecodeCase(str(stored), str(q.dtype), heads, kv_heads, head_dim, page_size, rows)
    stages = (choice or tuning.decode(case, device)).stages
    pairs = (
        BLOCKS
        if tuning.decode_blocks(str(stored), head_dim, device) > tuning.cores(device)
        and work.blocks % BLOCKS == 0
        else 1
    )
    of_pairs, parts = (pairs,) if pairs > 1 else (), head_dim // COLUMNS
    queries = q.reshape(rows * heads, head_dim)
    if len(queries) < padded:
        queries = jnp.pad(queries, ((0, padded - len(queries)), (0, 0)))
    signals = jax.new_ref(work.signals) if isinstance(work.signals, jax.Array) else work.signals
    lists = work.first, work.items, work.joins, signals

    out, *_ = plgpu.kernel(
        partial(_kernel, options=options.static, rows=rows, group=group, sinks=options.sinks is not None),
        out_type=(
            jax.ShapeDtypeStruct((rows * heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((work.slots, padded, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((work.slots, ROWS), jnp.float32),
        ),
        scratch_types={
            "ring": ring_of(q.dtype, k_pages, stages, pairs),
            "q_smem": tiled((*of_pairs, ROWS, head_dim), q.dtype),
            "o_smem": tiled((*of_pairs, parts, ROWS, COLUMNS), q.dtype, rows=math.gcd(group, 8)),
            "part_smem": plgpu.SMEM((*of_pairs, ROWS, COLUMNS), jnp.float32),
            "q_full": plgpu.Barrier(num_arrivals=parts, num_barriers=pairs),
        }
        | ({} if operand_in_registers else {"p_smem": tiled((*of_pairs, ROWS, TILE), q.dtype)}),
        grid=(work.blocks // pairs,),
        grid_names=("block",),
        num_threads=2 * pairs,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        queries,
        k_pages,
        v_pages,
        block_tables,
        lengths,
        *lists,
        *([] if options.sinks is None else [options.sinks]),
    )
    result: jax.Array = out.reshape(q.shape)
    return result


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, length_ref: Any,
    first_ref: Any, item_ref: Any, join_ref: Any, signal_ref: Any, *refs: Any,
    ring: dict[str, Any], q_smem: Any, o_smem: Any, part_smem: Any, q_full: Any, p_smem: Any = None,
    options: AttentionOptions, rows: int, group: int, sinks: bool,
) -> None:  # fmt: skip
    *sink_ref, out_ref, part_ref, sum_ref = refs
    window = options.window
    *of_pairs, _, head_dim = q_smem.shape
    padded, heads = part_ref.shape[1], out_ref.shape[0] // rows
    warpgroup = lax.axis_index("warpgroup")
    block, blocks, pair = lax.axis_index("block"), first_ref.shape[0] - 1, None
    if of_pairs:
        pair = lax.div(warpgroup, 2)
        block = block * of_pairs[0] + pair

    def own(ref: Any) -> Any:
        """This pair of warpgroups' part of shared memory or barriers."""
        return ref if pair is None else ref.at[pair]

    first, end, first_join, end_join = (first_ref[block + i, kind] for kind in range(2) for i in range(2))
    q_smem, o_smem, part_smem, q_full = map(own, (q_smem, o_smem, part_smem, q_full))
    p_smem = None if p_smem is None else own(p_smem)

    def side(name: str, ref: Any) -> Side:
        smem, full, free = (ring[f"{name}_{what}"] for what in ("smem", "full", "free"))
        if f"{name}_eight" not in ring:
            return Side((ref,), own(smem), full, free)
        eight, scale = (own(ring[f"{name}_{what}"]) for what in ("eight", "scale"))
        return Side((ref.values, ref.scale), own(smem), full, free, eight, scale)

    k, v = side("k", k_ref), side("v", v_ref)
    feed = Feed(k, v, item_ref, table_ref, window, ring["arrived"], pair)
    stages = k.smem.shape[0]
    columns = [pl.ds(at, COLUMNS) for at in range(0, head_dim, COLUMNS)]

    def attend(index: jax.Array, done: jax.Array) -> jax.Array:
        item = Item.read(item_ref, index)
        load_queries(item)

        def fold(tile: jax.Array, carry: Any) -> Any:
            m, total, accs = carry
            number = done + tile
            slot, stage = lax.rem(number, stages), feed.stage(number)
            plgpu.barrier_wait(k.full.at[stage])
            s = product(q_smem, k.smem.at[slot].transpose((1, 0)))
            if k.scale is not None:
                s *= lax.broadcast_in_dim(
                    _columns(k.scale.at[lax.rem(number, k.scale.shape[0])]), s.shape, [1]
                )
            plgpu.barrier_arrive(k.free.at[stage])
            s, factor = scores(s, options)
            s = jnp.where(seen(item, tile, window, (ROWS, TILE), 1, plgpu.Layout.WGMMA), s * factor, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            if v.scale is not None:
                scales = _columns(v.scale.at[lax.rem(number, v.scale.shape[0])])
                # other scales may be NaN
                real = seen(item, tile, window, (TILE,), 0, plgpu.Layout.WGMMA.reduce(0))
                p *= lax.broadcast_in_dim(jnp.where(real, scales, jnp.zeros_like(scales)), p.shape, [1])
            weights: Any = p.astype(q_smem.dtype)
            if p_smem is not None:
                p_smem[...] = weights
                plgpu.commit_smem()
                weights = p_smem
            plgpu.barrier_wait(v.full.at[stage])
            accs = [
                accumulate(
                    acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), weights, v.smem.at[slot, :, part]
                )
                for acc, part in zip(accs, columns, strict=True)
            ]
            plgpu.barrier_arrive(v.free.at[stage])
            return m_new, total, accs

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        m, total, accs = lax.fori_loop(
            0, item.tiles, fold, (per_row(MASKED), per_row(0.0), [zeros for _ in columns])
        )
        item = Item.read(item_ref, index)  # read again: keeping it during the loop would take registers
        pl.when(item.slot < 0)(partial(put, item, m, total, accs))
        pl.when(item.slot >= 0)(partial(put_part, item, m, total, accs))
        return done + item.tiles

    def first_query(item: Item | Join) -> Any:
        return item.row * heads + item.kv_head * group

    def load_queries(item: Item) -> None:
        """Loads the item's queries through o_smem: a TMA copy to tiled shared memory must start at a multiple
        of 8 rows.
        """
        head, some = first_query(item), pl.ds(0, padded)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the previous item's results
        for i, part in enumerate(columns):
            # zeros beyond the last query
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(head, padded), part], o_smem.at[i, some], q_full)
        plgpu.barrier_wait(q_full)
        for i, part in enumerate(columns):
            store(q_smem.at[some, part], plgpu.load(o_smem.at[i, some], layout=rows_by_warp()))
        plgpu.commit_smem()

    def put(item: Item, m: jax.Array, total: jax.Array, accs: list[jax.Array]) -> None:
        if sink_ref:
            sink = _by_row([sink_ref[0][item.kv_head * group + i] * LOG2_E for i in range(group)])
            most = jnp.maximum(m, sink)
            rescale = jnp.exp2(m - most)
            inverse = rescale / (total * rescale + jnp.exp2(sink - most))
        else:
            inverse = 1.0 / jnp.maximum(total, SMALLEST)
        for i, acc in enumerate(accs):
            store(o_smem.at[i], (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(o_smem.dtype))
        plgpu.commit_smem()
        copy_rows_out(o_smem, out_ref.at[pl.ds(first_query(item), group)])

    def put_part(item: Item, m: jax.Array, total: jax.Array, accs: list[jax.Array]) -> None:
        total = jnp.maximum(total, SMALLEST)
        inverse = 1.0 / total
        store(sum_ref.at[item.slot], m + jnp.log2(total))
        for acc, part in zip(accs, columns, strict=True):
            if part is not columns[0]:  # results of earlier items have been copied: see `load_queries`
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store(part_smem, acc * lax.broadcast_in_dim(inverse, acc.shape, [0]))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(part_smem.at[pl.ds(0, padded)], part_ref.at[item.slot, :, part])

        @pl.when(item.join >= 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            signal(signal_ref.at[item.join])

    def join_pair(index: jax.Array) -> None:
        pair = Join.read(join_ref, index)

        @pl.when(pair.parts > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            out = out_ref.at[pl.ds(first_query(pair), group)]
            sinks = [sink_ref[0][pair.kv_head * group + i] for i in range(group)] if sink_ref else []
            join(pair, signal_ref.at[index], part_ref, sum_ref, o_smem, out, sinks)

    def clear(turn: jax.Array) -> None:
        """Writes zeros for a row without a sequence."""
        row = block + turn * blocks

        @pl.when((row < rows) & (length_ref[jnp.minimum(row, rows - 1)] == 0))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i in range(len(columns)):
                store(
                    o_smem.at[i],
                    plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), o_smem.dtype), plgpu.Layout.WGMMA),
                )
            plgpu.commit_smem()
            for at in range(0, heads, ROWS):
                some = min(heads - at, ROWS)
                copy_rows_out(o_smem, out_ref.at[pl.ds(row * heads + at, some)])

    @pl.when(lax.rem(warpgroup, 2) == 0)
    def compute() -> None:
        if of_pairs:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        lax.fori_loop(first, end, attend, jnp.int32(0))
        pl.loop(0, pl.cdiv(rows, blocks))(clear)
        pl.loop(first_join, end_join)(join_pair)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(lax.rem(warpgroup, 2) == 1)
    def memory() -> None:
        if of_pairs:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        feed.run(first, end)


def _by_row(values: list[jax.Array]) -> jax.Array:
    """float32 [ROWS] that begins with the scalars; the other rows are never read back."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    row, result = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout), per_row(MASKED)
    for i, value in enumerate(values):
        result = jnp.where(row == i, value, result)
    return result


def _columns(x: Any) -> jax.Array:
    """x [TILE] in the layout that is broadcast to the rows of scores."""
    loaded: jax.Array = plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))
    return loaded
