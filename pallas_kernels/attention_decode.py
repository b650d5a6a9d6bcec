"""Paged attention for one query a sequence, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

One block of threads takes a (split, row, kv head). Its memory warpgroup copies tiles of 64 tokens by TMA, page by page as
the block table names them; its compute warpgroup folds each tile into an online softmax (Milakov and Gimelshein, 2018; Dao et
al., 2022). The tensor cores want 64 queries: the query heads of a kv head are the first of them, the others are never
set and never read back. That wastes products, of which decoding has plenty to spare, and no bandwidth, which it lives on.

A sequence's tiles are shared among the splits, so that few long sequences still fill the chip. Each split gives its own
softmax's result and the logarithm of its sum, and XLA joins them (Flash-Decoding; Dao et al., 2023), and attention sinks with them.

Tiles of an eight-bit cache come as they are stored, with their scales, and the memory warpgroup turns them into the queries'
dtype, which has all of their numbers, on their way to the tensor cores. The scales multiply scores and weights, in float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.mosaic_gpu import Tiling

from pallas_kernels import tuning
from pallas_kernels.hopper import accumulate, product
from pallas_kernels.quantized import Pages, Quantized
from pallas_kernels.softmax import LOG2_E, MASKED, SMALLEST, join, scores
from pallas_kernels.tuning import DecodeCase, DecodeChoice

QUERIES = 64  # rows of a product of the tensor cores
TILE = 64  # tokens of a stage
COLUMNS = 64  # of the head dimension that are multiplied, cleared and written at a time: more take too many registers
STAGE_BYTES = 1 << 16  # of keys and values in flight in a block: two blocks, or one of head dim 256, share a multiprocessor


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
    splits: int | None = None,
    stages: int | None = None,
    device: jax.Device | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """One query a sequence, over all of the sequence's tokens; `dispatch.why_decode_unsupported` says for what shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype, or Quantized to int8 or to the bits of
            float8_e4m3fn. What they hold for tokens that no query sees, NaN included, never reaches a result.
        block_tables: int32 [rows, width], page ids in order; read as far as a row's length goes, and some behind its window.
        lengths: int32 [rows], tokens of each sequence, the query's own included; 0 gives zeros, width * page_size is the most.
        scale, window, soft_cap, sinks: as in `xla.paged_attention_decode`.
        splits: parts of a sequence that blocks of threads work on side by side; None leaves them, and stages, to `tuning.decode`.
        stages: tiles of keys and values on their way to a block at a time, at least 2; None: as many as shared memory is meant for.
        device: that this will run on, for its limits; None: an H100 or H200.
        operand_in_registers: the second product takes its left side from registers and adds to what is there. False, which
            is slower, goes through shared memory: the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`.

    Returns:
        [rows, heads, head_dim], in q's dtype.
    """
    rows, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1:3]
    group = heads // kv_heads
    padded = -(-group // 8) * 8  # whole tiles of shared memory are copied
    tokens = block_tables.shape[1] * page_size
    stored = k_pages.values.dtype if isinstance(k_pages, Quantized) else k_pages.dtype
    case = DecodeCase(str(stored), str(q.dtype), heads, kv_heads, head_dim, page_size, rows, min(window or tokens, tokens))
    choice = tuning.decode(case, device) if splits is None else DecodeChoice(splits, stages)
    splits = choice.splits
    queries = jnp.pad(q.reshape(rows, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    shape = (splits, rows, kv_heads, padded)

    result = q.dtype if splits == 1 and sinks is None else jnp.dtype("float32")
    copies = TILE // min(page_size, TILE)
    stages = choice.stages or max(2, STAGE_BYTES // (2 * TILE * head_dim * q.dtype.itemsize))
    scratch: dict[str, Any] = {}
    if isinstance(k_pages, Quantized):
        small = head_dim < 256
        fetched, stages = choice.stages or (4 if small else 2), 2 if small else 1
        scales = plgpu.SMEM((fetched + stages + 1, TILE), jnp.float32)  # read until after the next tile's keys may be converted
        eight = _tiled((fetched, TILE, head_dim), k_pages.values.dtype)
        scratch = {"fetched": plgpu.Barrier(num_arrivals=4 * copies, num_barriers=fetched)}
        scratch |= {"k_eight": eight, "v_eight": eight, "k_scale": scales, "v_scale": scales}
        copies = 1  # by the memory warpgroup itself
    full, free = plgpu.Barrier(num_arrivals=copies, num_barriers=stages), plgpu.Barrier(num_barriers=stages)
    scratch |= {
        "q_smem": _tiled((QUERIES, head_dim), q.dtype),
        "k_smem": _tiled((stages, TILE, head_dim), q.dtype),
        "v_smem": _tiled((stages, TILE, head_dim), q.dtype),
        "p_smem": None if operand_in_registers else _tiled((QUERIES, TILE), q.dtype),
        "o_smem": _tiled((QUERIES, COLUMNS), result),
        "lse_smem": plgpu.SMEM((QUERIES,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "k_full": full,
        "v_full": full,
        "v_part": None if isinstance(k_pages, Quantized) else plgpu.Barrier(num_arrivals=copies),
        "k_free": free,
        "v_free": free,
    }
    out, lse = plgpu.kernel(
        partial(_kernel, scale=scale, window=window, soft_cap=soft_cap, splits=splits),
        out_type=(jax.ShapeDtypeStruct((*shape, head_dim), result), jax.ShapeDtypeStruct(shape, jnp.float32)),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        grid=(splits, kv_heads, rows),
        grid_names=("split", "kv_head", "row"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(queries, k_pages, v_pages, block_tables, lengths)
    out, lse = out[:, :, :, :group], lse[..., :group]
    return join(out, lse, None if sinks is None else sinks.reshape(kv_heads, group) * LOG2_E).reshape(q.shape).astype(q.dtype)


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any]) -> Any:
    """Shared memory as TMA and the tensor cores want it: tiles of 8 rows by up to 128 bytes, swizzled."""
    row = min(128, shape[-1] * dtype.itemsize)
    tiles = plgpu.TilingTransform((8, row // dtype.itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(row)))  # type: ignore[abstract]


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, length_ref: Any, out_ref: Any, lse_ref: Any, *,
    q_smem: Any, k_smem: Any, v_smem: Any, o_smem: Any, lse_smem: Any, p_smem: Any = None,
    q_full: Any, k_full: Any, v_full: Any, k_free: Any, v_free: Any, v_part: Any = None,
    k_eight: Any = None, v_eight: Any = None, k_scale: Any = None, v_scale: Any = None, fetched: Any = None,
    scale: float, window: int | None, soft_cap: float | None, splits: int,
) -> None:  # fmt: skip
    stages, _, head_dim = k_smem.shape
    page_size = (k_ref if fetched is None else k_ref.values).shape[2]
    padded = q_ref.shape[2]
    split, kv_head, row, warpgroup = (lax.axis_index(name) for name in ("split", "kv_head", "row", "warpgroup"))
    length = length_ref[row]
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)  # that is seen
    first_tile, end_tile = lax.div(first, TILE), lax.div(length + TILE - 1, TILE)
    share = lax.div(end_tile - first_tile + splits - 1, splits)
    start = jnp.minimum(first_tile + split * share, end_tile)
    count = jnp.minimum(share, end_tile - start)

    @pl.when(warpgroup == 0)
    def compute() -> None:
        plgpu.copy_gmem_to_smem(q_ref.at[row, kv_head], q_smem.at[pl.ds(0, padded)], q_full)
        plgpu.barrier_wait(q_full)
        parts = [pl.ds(at, COLUMNS) for at in range(0, head_dim, COLUMNS)]

        def fold(i: jax.Array, carry: Any) -> Any:
            m, total, accs = carry
            slot = lax.rem(i, stages)
            token = (start + i) * TILE
            plgpu.barrier_wait(k_full.at[slot])
            s = product(q_smem, k_smem.at[slot].transpose((1, 0)))
            if fetched is not None:
                s *= lax.broadcast_in_dim(_columns(k_scale.at[lax.rem(i, k_scale.shape[0])]), s.shape, [1])
            plgpu.barrier_arrive(k_free.at[slot])
            s, factor = scores(s, scale, soft_cap)
            s = jnp.where(_seen(token, 1, (QUERIES, TILE), first, length, window, plgpu.Layout.WGMMA), s * factor, -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            if fetched is not None:
                scales = _columns(v_scale.at[lax.rem(i, v_scale.shape[0])])
                seen = _seen(token, 0, (TILE,), first, length, window, plgpu.Layout.WGMMA.reduce(0))
                p *= lax.broadcast_in_dim(jnp.where(seen, scales, jnp.zeros_like(scales)), p.shape, [1])  # which may be NaN
            weights: Any = p.astype(q_smem.dtype)
            if p_smem is not None:
                p_smem[...] = weights
                plgpu.commit_smem()
                weights = p_smem
            plgpu.barrier_wait(v_full.at[slot])
            accs = [
                accumulate(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), weights, v_smem.at[slot, :, part])
                for acc, part in zip(accs, parts, strict=True)
            ]
            plgpu.barrier_arrive(v_free.at[slot])
            return m_new, total, accs

        def row_of(value: float) -> jax.Array:
            filled: jax.Array = plgpu.layout_cast(jnp.full((QUERIES,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            return filled

        zeros = plgpu.layout_cast(jnp.zeros((QUERIES, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        init = row_of(MASKED), row_of(0.0), [zeros for _ in parts]
        m, total, accs = lax.fori_loop(0, count, fold, init)
        total = jnp.maximum(total, SMALLEST)
        inverse = 1.0 / total
        lse_smem[...] = m + jnp.log2(total)
        for acc, part in zip(accs, parts, strict=True):
            o_smem[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(o_smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, padded)], out_ref.at[split, row, kv_head, :, part])
            plgpu.wait_smem_to_gmem(0)
        plgpu.copy_smem_to_gmem(lse_smem.at[pl.ds(0, padded)], lse_ref.at[split, row, kv_head])
        plgpu.wait_smem_to_gmem(0)

    piece = min(page_size, TILE)  # of a page that one copy takes
    places = range(0, TILE, piece)

    def pages_of(token: jax.Array) -> list[jax.Array]:
        last = lax.div(length - 1, page_size)  # here, or it would take a register of the other warpgroup's too
        return [table_ref[row, jnp.minimum(lax.div(token + at, page_size), last)] for at in places]

    def copy(ref: Any, smem: Any, full: Any, token: jax.Array, pages: list[jax.Array]) -> None:
        for at, page in zip(places, pages, strict=True):
            from_page = ref.at[page, kv_head, pl.ds(lax.rem(token + at, page_size), piece)]
            plgpu.copy_gmem_to_smem(from_page, smem.at[pl.ds(at, piece)], full, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    def clear(token: jax.Array, values: jax.Array, layout: Any) -> jax.Array:
        """Zeros for values of tokens that are not seen: their weights are zeros, and 0 * NaN is NaN."""
        return jnp.where(_seen(token, 0, values.shape, first, length, window, layout), values, jnp.zeros_like(values))

    def memory() -> None:
        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            slot, token = lax.rem(i, stages), (start + i) * TILE
            pages = pages_of(token)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, k_free.at[slot]))
            copy(k_ref, k_smem.at[slot], k_full.at[slot], token, pages)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, v_free.at[slot]))
            whole = (token >= first) & (token + TILE <= length)
            pl.when(whole)(partial(copy, v_ref, v_smem.at[slot], v_full.at[slot], token, pages))

            @pl.when(jnp.logical_not(whole))
            def fill_in_part() -> None:
                copy(v_ref, v_smem.at[slot], v_part, token, pages)
                plgpu.barrier_wait(v_part)
                for at in range(0, head_dim, COLUMNS):
                    v = v_smem.at[slot, :, pl.ds(at, COLUMNS)]
                    v[...] = clear(token, plgpu.load(v, layout=plgpu.Layout.WGMMA), plgpu.Layout.WGMMA)
                plgpu.commit_smem()
                for _ in places:
                    plgpu.barrier_arrive(v_full.at[slot])

    def converting_memory() -> None:
        ahead = k_eight.shape[0]

        def fetch(i: Any, pages: list[jax.Array]) -> None:
            slot, token = lax.rem(i, ahead), (start + i) * TILE
            for ref, eight, scales in ((k_ref, k_eight, k_scale), (v_ref, v_eight, v_scale)):
                copy(ref.values, eight.at[slot], fetched.at[slot], token, pages)
                copy(ref.scale, scales.at[lax.rem(i, scales.shape[0])], fetched.at[slot], token, pages)

        def convert(eight: Any, smem: Any, token: jax.Array, clears: bool) -> None:
            width = min(head_dim, 128)
            for at in range(0, head_dim, width):
                numbers = _numbers(plgpu.load(eight.at[:, pl.ds(at, width)], layout=_wide(width)), smem.dtype)
                smem[:, pl.ds(at, width)] = clear(token, numbers, _wide(width)) if clears else numbers
            plgpu.commit_smem()

        def step(i: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
            slot, into, token = lax.rem(i, ahead), lax.rem(i, stages), (start + i) * TILE
            next_pages = pages_of(token + (ahead + 1) * TILE)
            plgpu.barrier_wait(fetched.at[slot])
            pl.when(i >= stages)(partial(plgpu.barrier_wait, k_free.at[into]))
            convert(k_eight.at[slot], k_smem.at[into], token, False)
            plgpu.barrier_arrive(k_full.at[into])
            pl.when(i >= stages)(partial(plgpu.barrier_wait, v_free.at[into]))
            whole = (token >= first) & (token + TILE <= length)
            for clears, when in ((False, whole), (True, jnp.logical_not(whole))):
                pl.when(when)(partial(convert, v_eight.at[slot], v_smem.at[into], token, clears))
            plgpu.barrier_arrive(v_full.at[into])
            pl.when(i + ahead < count)(partial(fetch, i + ahead, pages))
            return next_pages

        for i in range(ahead):
            pl.when(i < count)(partial(fetch, jnp.int32(i), pages_of((start + i) * TILE)))
        lax.fori_loop(0, count, step, pages_of((start + ahead) * TILE))

    @pl.when(warpgroup == 1)
    def feed() -> None:
        memory() if fetched is None else converting_memory()
        for slot in range(stages):  # waits for each slot's last release, so that every barrier phase is observed
            for free in (k_free, v_free):
                pl.when(slot < count)(partial(plgpu.barrier_wait, free.at[slot]))


def _seen(
    token: jax.Array, axis: int, shape: tuple[int, ...], first: jax.Array, length: jax.Array, window: int | None, layout: Any
) -> jax.Array:
    """Which of the tokens token + arange(TILE), which lie along the axis, are in [first, length)."""
    tokens = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) + token
    return tokens < length if window is None else (tokens >= first) & (tokens < length)


def _columns(x: Any) -> jax.Array:
    """x [TILE] as it is broadcast to the rows of scores."""
    loaded: jax.Array = plgpu.load(x, layout=plgpu.Layout.WGMMA.reduce(0))
    return loaded


def _numbers(x: jax.Array, dtype: jnp.dtype[Any]) -> jax.Array:
    """int8, or the bits of float8_e4m3fn, in a dtype that has all of their values."""
    if x.dtype == jnp.int8:
        return x.astype(dtype)
    return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float16).astype(dtype)  # which the hardware converts to


def _wide(width: int) -> Any:
    """Layout of [n, width]: a thread reads eight bytes and writes eight numbers side by side, a few threads a row of tiles."""
    rows = 256 // width  # of a warp
    tiles = Tiling(((4 * rows, width), (rows, width), (8,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
