"""Joins the parts of a softmax that decode attention's work list has split, in a Pallas Mosaic GPU kernel for Hopper.

A thread block computes COLUMNS of a join's head dimension. It reads several parts at a time to hide memory
latency. It adds parts in the order of the sequence, so results do not depend on which part was ready first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import COLUMNS, rows_by_warp
from pallas_kernels.softmax import LOG2_E, MASKED
from pallas_kernels.versions import store

NUMBERS = 1 << 13  # values of parts in a block's registers: 64 per thread


def join_parts(
    out: jax.Array,
    parts: jax.Array,
    sums: jax.Array,
    joins: jax.Array,
    sinks: jax.Array | None,
    *,
    heads: int,
    group: int,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns `out` with the joined results of split pairs.

    Args:
        out: [rows * heads, head_dim], which holds the results of pairs that were not split.
        parts: float32 [slots, padded, head_dim], each part's normalized result. Rows after the first `group` are padding.
        sums: float32 [slots, 64], the base-2 logarithms of the parts' softmax sums.
        joins: `WorkList.joins`.
        sinks: float32 [heads], scores without a value.
    """
    padded, head_dim = parts.shape[1:]
    cell = jax.new_ref(out)
    plgpu.kernel(
        partial(_kernel, heads=heads, group=group),
        scratch_types={"o_smem": plgpu.SMEM((padded, COLUMNS), out.dtype)},
        grid=(head_dim // COLUMNS, len(joins)),
        grid_names=("part", "join"),
        kernel_name="paged_attention_join",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(cell, parts, sums, joins, *([] if sinks is None else [sinks]))
    return jax.freeze(cell)


def _kernel(out_ref: Any, part_ref: Any, sum_ref: Any, join_ref: Any, *sink_ref: Any, o_smem: Any, heads: int, group: int) -> None:
    padded = part_ref.shape[1]
    index, columns = lax.axis_index("join"), pl.ds(lax.axis_index("part") * COLUMNS, COLUMNS)
    row, kv_head, first, count = (join_ref[index, field] for field in range(4))
    together = max(1, NUMBERS // (padded * COLUMNS))

    def fold(turn: jax.Array, carry: Any) -> Any:
        m, total, acc = carry
        numbers = [turn * together + i for i in range(together)]
        slots = [first + jnp.minimum(number, count - 1) for number in numbers]
        lse = [_load(sum_ref.at[slot, pl.ds(0, padded)], rows_by_warp().reduce(1)) for slot in slots]
        values = [_load(part_ref.at[slot, :, columns], rows_by_warp()) for slot in slots]
        lse = [x + jnp.where(number < count, 0.0, MASKED) for number, x in zip(numbers, lse, strict=True)]
        m_new = m
        for x in lse:
            m_new = jnp.maximum(m_new, x)
        alpha = jnp.exp2(m - m_new)
        total, acc = total * alpha, acc * _wide(alpha, acc)
        for x, value in zip(lse, values, strict=True):
            weight = jnp.exp2(x - m_new)
            total, acc = total + weight, acc + value * _wide(weight, acc)
        return m_new, total, acc

    @pl.when(count > 0)
    def _() -> None:
        at = row * heads + kv_head * group
        zeros = plgpu.layout_cast(jnp.zeros((padded, COLUMNS), jnp.float32), rows_by_warp())
        nothing = plgpu.layout_cast(jnp.zeros((padded,), jnp.float32), rows_by_warp().reduce(1))
        m, total = nothing + 2 * MASKED, nothing
        if sink_ref:
            line = plgpu.broadcasted_iota(jnp.int32, (padded,), 0, layout=rows_by_warp().reduce(1))
            for i in range(group):
                m = jnp.where(line == i, sink_ref[0][kv_head * group + i] * LOG2_E, m)
            total += 1.0
        _, total, acc = lax.fori_loop(0, lax.div(count + together - 1, together), fold, (m, total, zeros))
        store(o_smem, (acc * _wide(1.0 / total, acc)).astype(o_smem.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_smem.at[pl.ds(0, group)], out_ref.at[pl.ds(at, group), columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _load(x: Any, layout: Any) -> jax.Array:
    loaded: jax.Array = plgpu.load(x, layout=layout, optimized=False)
    return loaded


def _wide(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, like.shape, [0])
