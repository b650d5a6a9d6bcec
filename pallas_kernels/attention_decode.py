"""Paged attention for one query a sequence, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

One block of threads takes a (split, row, kv head). Its memory warpgroup copies tiles of 64 tokens by TMA, page by page as
the block table names them; its compute warpgroup folds each tile into an online softmax (Milakov and Gimelshein, 2018; Dao et
al., 2022). The tensor cores want 64 queries: the query heads of a kv head are the first of them, the others are never
set and never read back. That wastes products, of which decoding has plenty to spare, and no bandwidth, which it lives on.

A sequence's tiles are shared among the splits, so that few long sequences still fill the chip. Each split gives its own
softmax's result and the logarithm of its sum, and XLA joins them (Flash-Decoding; Dao et al., 2023).
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

QUERIES = 64  # rows of a product of the tensor cores
TILE = 64  # tokens of a stage
COLUMNS = 64  # of the head dimension that are multiplied, cleared and written at a time: more take too many registers
STAGE_BYTES = 1 << 16  # of keys and values in flight in a block: two blocks, or one of head dim 256, share a multiprocessor
BLOCKS_TO_FILL = 264  # two for each of an H100's or H200's 132 multiprocessors
SPLIT_TOKENS = 256  # a split should have as many
MASKED = -1e30  # finite, so that a row that has seen nothing yet gives no NaN
SMALLEST = 1e-30  # of a sum that is divided by
LOG2_E = math.log2(math.e)


def default_splits(rows: int, kv_heads: int, tokens: int) -> int:
    """Splits that fill the chip, where the tokens that a row may have to read suffice."""
    return max(1, min(BLOCKS_TO_FILL // (rows * kv_heads), tokens // SPLIT_TOKENS))


def paged_attention_decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    splits: int | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """One query a sequence, over all of the sequence's tokens; `dispatch.decode_supported` says for what shapes and dtypes.

    Args:
        q: bfloat16 or float16 [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        k_pages, v_pages: [num_pages, kv_heads, page_size, head_dim] in q's dtype. What unused pages and the unused part
            of a last page hold, NaN included, never reaches a result.
        block_tables: int32 [rows, width], page ids in order; read as far as a row's length goes.
        lengths: int32 [rows], tokens of each sequence, the query's own included; 0 gives zeros, width * page_size is the most.
        scale, window, soft_cap: as in `xla.paged_attention_decode`.
        splits: parts of a sequence that blocks of threads work on side by side; None chooses by the shapes.
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
    splits = splits or default_splits(rows, kv_heads, tokens if window is None else min(window, tokens))
    queries = jnp.pad(q.reshape(rows, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    shape = (splits, rows, kv_heads, padded)

    stages = max(2, STAGE_BYTES // (2 * TILE * head_dim * q.dtype.itemsize))
    result = q.dtype if splits == 1 else jnp.dtype("float32")
    copies = TILE // min(page_size, TILE)
    full, free = plgpu.Barrier(num_arrivals=copies, num_barriers=stages), plgpu.Barrier(num_barriers=stages)
    scratch = {
        "q_smem": _tiled((QUERIES, head_dim), q.dtype),
        "k_smem": _tiled((stages, TILE, head_dim), q.dtype),
        "v_smem": _tiled((stages, TILE, head_dim), q.dtype),
        "p_smem": None if operand_in_registers else _tiled((QUERIES, TILE), q.dtype),
        "o_smem": _tiled((QUERIES, COLUMNS), result),
        "lse_smem": plgpu.SMEM((QUERIES,), jnp.float32),
        "q_full": plgpu.Barrier(),
        "k_full": full,
        "v_full": full,
        "v_part": plgpu.Barrier(num_arrivals=copies),
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
    return _join(out, lse)[:, :, :group].reshape(q.shape).astype(q.dtype)


def _tiled(shape: tuple[int, ...], dtype: jnp.dtype[Any]) -> Any:
    """Shared memory as TMA and the tensor cores want it: tiles of 8 rows by 128 bytes, swizzled."""
    tiles = plgpu.TilingTransform((8, 128 // dtype.itemsize))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(128)))  # type: ignore[abstract]


def _join(out: jax.Array, lse: jax.Array) -> jax.Array:
    """Results [splits, ..., head_dim] of parts of a softmax, and the base-2 logarithms [splits, ...] of their sums, to the whole's."""
    if out.shape[0] == 1:
        return out[0]
    weights = jnp.exp2(lse - lse.max(0))
    return (out * weights[..., None]).sum(0) / weights.sum(0)[..., None]


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, table_ref: Any, length_ref: Any, out_ref: Any, lse_ref: Any, *,
    q_smem: Any, k_smem: Any, v_smem: Any, o_smem: Any, lse_smem: Any, p_smem: Any = None,
    q_full: Any, k_full: Any, v_full: Any, v_part: Any, k_free: Any, v_free: Any,
    scale: float, window: int | None, soft_cap: float | None, splits: int,
) -> None:  # fmt: skip
    stages, _, head_dim = k_smem.shape
    page_size = k_ref.shape[2]
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
            s = _product(q_smem, k_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_arrive(k_free.at[slot])
            s = jnp.where(_seen(token, 1, (QUERIES, TILE), first, length, window), _logits(s, scale, soft_cap), -jnp.inf)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
            total = total * alpha + p.sum(axis=1)
            weights: Any = p.astype(q_smem.dtype)
            if p_smem is not None:
                p_smem[...] = weights
                plgpu.commit_smem()
                weights = p_smem
            plgpu.barrier_wait(v_full.at[slot])
            accs = [
                _accumulate(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]), weights, v_smem.at[slot, :, part])
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

    @pl.when(warpgroup == 1)
    def memory() -> None:
        piece = min(page_size, TILE)  # of a page that one copy takes
        places = range(0, TILE, piece)
        last_page = lax.div(length - 1, page_size)

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            slot, token = lax.rem(i, stages), (start + i) * TILE
            pages = [table_ref[row, jnp.minimum(lax.div(token + at, page_size), last_page)] for at in places]

            def copy(ref: Any, smem: Any, full: Any) -> None:
                for at, page in zip(places, pages, strict=True):
                    part_of_page = pl.ds(lax.rem(token + at, page_size), piece)
                    plgpu.copy_gmem_to_smem(ref.at[page, kv_head, part_of_page], smem.at[pl.ds(at, piece)], full)

            pl.when(i >= stages)(partial(plgpu.barrier_wait, k_free.at[slot]))
            copy(k_ref, k_smem.at[slot], k_full.at[slot])
            pl.when(i >= stages)(partial(plgpu.barrier_wait, v_free.at[slot]))
            whole = (token >= first) & (token + TILE <= length)
            pl.when(whole)(partial(copy, v_ref, v_smem.at[slot], v_full.at[slot]))

            @pl.when(jnp.logical_not(whole))
            def clear() -> None:  # values of tokens that are not seen: their weights are zeros, and 0 * NaN is NaN
                copy(v_ref, v_smem.at[slot], v_part)
                plgpu.barrier_wait(v_part)
                for at in range(0, head_dim, COLUMNS):
                    v = v_smem.at[slot, :, pl.ds(at, COLUMNS)]
                    values = plgpu.load(v, layout=plgpu.Layout.WGMMA)
                    v[...] = jnp.where(_seen(token, 0, values.shape, first, length, window), values, jnp.zeros_like(values))
                plgpu.commit_smem()
                for _ in places:
                    plgpu.barrier_arrive(v_full.at[slot])

        for slot in range(stages):  # each slot's last release: no barrier is left in a phase that nobody saw
            for free in (k_free, v_free):
                pl.when(slot < count)(partial(plgpu.barrier_wait, free.at[slot]))


def _product(left: Any, right: Any) -> jax.Array:
    """left [QUERIES, n] @ right [n, columns] in float32."""

    def multiply(out: Any) -> Any:
        plgpu.wgmma(out, left, right)
        return out[...]

    product: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((QUERIES, right.shape[1]), jnp.float32))
    return product


def _accumulate(acc: jax.Array, left: Any, right: Any) -> jax.Array:
    """acc [QUERIES, n] + left @ right; in place if left is in registers."""
    if not isinstance(left, jax.Array):
        return acc + _product(left, right)
    total: jax.Array = pl.run_state(lambda out: plgpu.wgmma(out, left, right))(plgpu.WGMMAAccumulatorRef.init(acc))
    return total


def _logits(s: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scaled and capped scores, times log2(e): powers of two are what the hardware takes."""
    if soft_cap is None:
        return s * (scale * LOG2_E)
    # tanh(x) = 1 - 2 / (1 + exp(2 x)), since the hardware's own tanh has eleven bits; and 1 / y as rsqrt(y)^2, since the registers
    # that division takes would leave room for one block where there is room for two.
    inverse_root = lax.rsqrt(1.0 + jnp.exp2(s * (2.0 * scale * LOG2_E / soft_cap)))
    return soft_cap * LOG2_E * (1.0 - 2.0 * inverse_root * inverse_root)


def _seen(token: jax.Array, axis: int, shape: tuple[int, ...], first: jax.Array, length: jax.Array, window: int | None) -> jax.Array:
    """Which of the tokens token + arange(TILE), which lie along the axis, are in [first, length)."""
    tokens = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + token
    return tokens < length if window is None else (tokens >= first) & (tokens < length)
