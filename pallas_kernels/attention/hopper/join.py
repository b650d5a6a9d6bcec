"""The end of decode attention's kernel for pairs that its work list has split: joins the parts of the
softmax.

The block that has a pair's last part joins all of them. It waits for the other parts after its own items, so
it waits for earlier blocks only, and none of these waits before it has signalled. Parts are added in the
order of the sequence, so results do not depend on which part was ready first. Several are read at a time to
hide memory latency.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.softmax import LOG2_E, MASKED
from pallas_kernels.mosaic.hopper import COLUMNS, copy_rows_out, rows_by_warp
from pallas_kernels.mosaic.semaphores import wait
from pallas_kernels.mosaic.versions import store

NUMBERS = 1 << 13  # values of parts in a warpgroup's registers: 64 per thread


class Join(NamedTuple):
    """A join of a work list, as int32 scalars; see `WorkList.joins`."""

    row: jax.Array
    kv_head: jax.Array
    first: jax.Array
    parts: jax.Array
    elsewhere: jax.Array
    rows: jax.Array

    @staticmethod
    def read(ref: Any, index: Any) -> Join:
        return Join(*(ref[index, field] for field in range(len(Join._fields))))


def await_parts(item: Join, signals: Any) -> None:
    """Waits for the parts that are in other blocks; signals: the join's semaphore."""
    pl.when(item.elsewhere > 0)(partial(wait, signals, item.elsewhere))


def join(
    item: Join, row: Any, part_ref: Any, sum_ref: Any, o_smem: Any, out: Any, sinks: list[jax.Array]
) -> None:
    """Writes the result of a row of the pair.

    All parts must be stored: see `await_parts`, and copies of this block's own parts must have finished.

    Args:
        row: index in the group.
        part_ref: float32 [slots, lines, head_dim] in global memory, each part's normalized results. Lines
            after the first `group` are padding.
        sum_ref: float32 [slots, 64] in global memory, the base-2 logarithms of the parts' softmax sums, of
            all rows in the slot of the first.
        o_smem: [head_dim // COLUMNS, lines, COLUMNS], shared memory that nothing reads. The copies from it
            are not awaited.
        out: [group, head_dim] in global memory.
        sinks: for each query head of the pair, a score without a value; empty for none.
    """
    for i in range(part_ref.shape[2] // COLUMNS):
        columns = pl.ds(i * COLUMNS, COLUMNS)
        joined = _joined(item, row, part_ref, sum_ref, columns, sinks)
        store(o_smem.at[i], joined.astype(o_smem.dtype))
    plgpu.commit_smem()
    copy_rows_out(o_smem, out)


def _joined(
    item: Join, row: Any, part_ref: Any, sum_ref: Any, columns: Any, sinks: list[jax.Array]
) -> jax.Array:
    lines = part_ref.shape[1]
    together = max(1, NUMBERS // (lines * COLUMNS))

    def fold(turn: jax.Array, carry: Any) -> Any:
        m, total, acc = carry
        numbers = [turn * together + i for i in range(together)]
        slots = [item.first + jnp.minimum(number, item.parts - 1) * item.rows for number in numbers]
        at = pl.ds(row * lines, lines)
        lse = [_load(sum_ref.at[slot, at], rows_by_warp().reduce(1)) for slot in slots]
        values = [_load(part_ref.at[slot + row, :, columns], rows_by_warp()) for slot in slots]
        lse = [
            x + jnp.where(number < item.parts, 0.0, MASKED) for number, x in zip(numbers, lse, strict=True)
        ]
        m_new = m
        for x in lse:
            m_new = jnp.maximum(m_new, x)
        alpha = jnp.exp2(m - m_new)
        total, acc = total * alpha, acc * _wide(alpha, acc)
        for x, value in zip(lse, values, strict=True):
            weight = jnp.exp2(x - m_new)
            total, acc = total + weight, acc + value * _wide(weight, acc)
        return m_new, total, acc

    zeros = plgpu.layout_cast(jnp.zeros((lines, COLUMNS), jnp.float32), rows_by_warp())
    nothing = plgpu.layout_cast(jnp.zeros((lines,), jnp.float32), rows_by_warp().reduce(1))
    m, total = nothing + 2 * MASKED, nothing
    if sinks:
        line = plgpu.broadcasted_iota(jnp.int32, (lines,), 0, layout=rows_by_warp().reduce(1))
        for i, sink in enumerate(sinks):
            m = jnp.where(line == i, sink * LOG2_E, m)
        total += 1.0
    _, total, acc = lax.fori_loop(0, lax.div(item.parts + together - 1, together), fold, (m, total, zeros))
    result: jax.Array = acc * _wide(1.0 / total, acc)
    return result


def _load(x: Any, layout: Any) -> jax.Array:
    loaded: jax.Array = plgpu.load(x, layout=layout, optimized=False)
    return loaded


def _wide(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x, like.shape, [0])
