"""The body of the Hopper kernel for decode attention; see `decode.py`.

The memory warpgroup of a pair is in `decode_feed`, the end of pairs that the work list splits in
`attention_join`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper import few_lines
from pallas_kernels.attention.hopper.decode_feed import (
    QUERY_UNIT,
    Feed,
    PagesInFlight,
    WorkItem,
    seen,
    tokens_of,
)
from pallas_kernels.attention.hopper.join import Join, await_parts, join
from pallas_kernels.attention.options import AttentionOptions
from pallas_kernels.attention.softmax import LOG2_E, MASKED, SMALLEST, scores, weight_factor
from pallas_kernels.attention.work_list import TILE
from pallas_kernels.mosaic.hopper import (
    COLUMNS,
    ROWS,
    accumulate,
    copy_rows_out,
    per_row,
    product,
    rows_by_warp,
)
from pallas_kernels.mosaic.refs import Refs
from pallas_kernels.mosaic.semaphores import signal
from pallas_kernels.mosaic.versions import store

# per compute thread and per memory thread, if two pairs of warpgroups share a multiprocessor
REGISTERS = 152, 104
Accumulators = list[jax.Array]  # float32 [ROWS, COLUMNS] for each COLUMNS channels of the head


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        q: [rows * heads, head_dim].
        k, v: [num_pages, kv_heads, page_size, head_dim], or Quantized.
        tables, lengths: int32 [rows, width] and [rows].
        first, items, joins, signals: of the work list.
        sinks: float32 [heads], or None.
    """

    q: Any
    k: Any
    v: Any
    tables: Any
    lengths: Any
    first: Any
    items: Any
    joins: Any
    signals: Any
    sinks: Any = None


class Outputs(NamedTuple):
    """In global memory.

    Attributes:
        out: [rows * heads, head_dim].
        parts: float32 [slots, lines, head_dim], normalized results of parts of pairs; of each row the group's
            heads, and padding.
        sums: float32 [slots, ROWS], base-2 logarithms of the parts' softmax sums, of all rows in the slot of
            the first.
    """

    out: Any
    parts: Any
    sums: Any


class Scratch(NamedTuple):
    """In shared memory, of each pair of warpgroups: arrays have an axis of pairs first if a block has
    several.

    Attributes:
        o: [head_dim // COLUMNS, ROWS, COLUMNS], queries and results on their way. Each row of an item has
            `Form.lines` lines, here and in all that has ROWS.
        p: [ROWS, TILE], weights, if the second product reads them from shared memory; else None.
        part: float32 [ROWS, COLUMNS], a part's result on its way.
        q_full: barriers of queries, one for each row of an item and pair of warpgroups.
        q: [ROWS, head_dim], in units of QUERY_UNIT if it has another dtype than o.
        ring: keys and values in flight.
    """

    o: Any
    p: Any
    part: Any
    q_full: Any
    q: Any
    ring: PagesInFlight

    def of_pair(self, pair: jax.Array) -> Scratch:
        """A pair's part, and the whole ring."""
        p = None if self.p is None else self.p.at[pair]
        return Scratch(self.o.at[pair], p, self.part.at[pair], self.q_full, self.q.at[pair], self.ring)


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        rows: of the batch.
        most_rows: of an item.
        group: query heads per kv head.
        lines: of a product for each row: the group's heads, and padding.
        options: without arrays.
    """

    rows: int
    most_rows: int
    group: int
    lines: int
    options: AttentionOptions


def run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, scratch = refs.inputs, refs.scratch
    pairs = scratch.q.shape[0] if len(scratch.q.shape) == 3 else None
    warpgroup = lax.axis_index("warpgroup")
    block, blocks, pair = lax.axis_index("block"), inputs.first.shape[0] - 1, None
    if pairs is not None:
        pair = lax.div(warpgroup, 2)
        block = block * pairs + pair
    first, end, first_join, end_join = (inputs.first[block + i, kind] for kind in range(2) for i in range(2))
    part = scratch if pair is None else scratch.of_pair(pair)
    k, v = part.ring.k.of_pair(inputs.k, pair), part.ring.v.of_pair(inputs.v, pair)
    in_registers = scratch.p is None
    feed = Feed(k, v, inputs.items, inputs.tables, form.options.window, part.ring.arrived, pair, in_registers)
    compute = Compute(inputs, refs.outputs, part, form, feed)

    @pl.when(lax.rem(warpgroup, 2) == 0)
    def _() -> None:
        if pairs is not None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        lax.fori_loop(first, end, compute.attend, jnp.int32(0))
        pl.loop(0, pl.cdiv(form.rows, blocks))(lambda turn: compute.clear(block + turn * blocks))
        pl.loop(first_join, end_join)(compute.join_pair)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(lax.rem(warpgroup, 2) == 1)
    def _() -> None:
        if pairs is not None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        feed.run(first, end)


@dataclass(frozen=True)
class Compute:
    """The compute warpgroup of a pair: folds the tiles of its items into online softmaxes, and writes
    results; few: half of each thread's lines is padding, see `few_lines`.
    """

    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    form: Form
    feed: Feed
    few: bool = False

    @property
    def _columns(self) -> list[Any]:
        return [pl.ds(at, COLUMNS) for at in range(0, self.scratch.q.shape[-1], COLUMNS)]

    @property
    def _enlarged(self) -> float:
        return weight_factor(self.feed.v.smem.dtype, scaled=self.feed.v.scale is not None)

    @property
    def _heads(self) -> int:
        heads: int = self.outputs.out.shape[0] // self.form.rows
        return heads

    @property
    def _layout(self) -> Any:
        """The layout of scores."""
        return few_lines.LAYOUT if self.few else plgpu.Layout.WGMMA

    def _rescaled(self, acc: jax.Array, alpha: jax.Array) -> jax.Array:
        used = few_lines.first_lines(acc) if self.few else acc
        used *= lax.broadcast_in_dim(alpha, used.shape, [0])
        return few_lines.all_lines(used, acc) if self.few else used

    def _along_columns(self, x: Any) -> jax.Array:
        """x [TILE] in the layout that is broadcast to the lines of scores."""
        loaded: jax.Array = plgpu.load(x, layout=self._layout.reduce(0))
        return loaded

    def attend(self, index: jax.Array, done: jax.Array) -> jax.Array:
        """Processes an item, given the number of tiles before it in the block, and returns that after it."""
        item = WorkItem.read(self.inputs.items, index)
        self._load_queries(item)
        folded = partial(self._folded, item, done)
        if self.scratch.p is None and self.form.lines <= few_lines.USED:
            few = partial(replace(self, few=True)._folded, item, done)
            m, total, accs = lax.cond(item.rows == 1, few, folded) if self.form.most_rows > 1 else few()
        else:
            m, total, accs = folded()
        # read again: keeping it during the loop would take registers
        item = WorkItem.read(self.inputs.items, index)
        pl.when(item.slot < 0)(partial(self._put, item, m, total, accs))
        pl.when(item.slot >= 0)(partial(self._put_part, item, m, total, accs))
        return done + item.tiles

    def _folded(self, item: WorkItem, done: jax.Array) -> tuple[jax.Array, jax.Array, Accumulators]:
        """Folds all tiles of an item, see `_fold`."""
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        lines = few_lines.LINES if self.few else ROWS
        m, total = (
            plgpu.layout_cast(jnp.full((lines,), value, jnp.float32), self._layout.reduce(1))
            for value in (MASKED, 0.0)
        )
        start = m, total, [zeros for _ in self._columns]
        m, total, accs = lax.fori_loop(0, item.tiles, partial(self._fold, item, done), start)
        return (few_lines.per_line(m), few_lines.per_line(total), accs) if self.few else (m, total, accs)

    def _fold(self, item: WorkItem, done: jax.Array, tile: jax.Array, carry: Any) -> Any:
        """Folds a tile into the softmax: the rows' maxima, their sums, and the sums of weighted values."""
        m, total, accs = carry
        k, v, q, options = self.feed.k, self.feed.v, self.scratch.q, self.form.options
        number = done + tile
        slot, stage = lax.rem(number, k.smem.shape[0]), self.feed.stage(number)
        plgpu.barrier_wait(k.full.at[stage])
        s = product(q, k.smem.at[slot].transpose((1, 0)))
        if self.few:
            s = few_lines.first_lines(s)
        if k.scale is not None:
            s *= lax.broadcast_in_dim(
                self._along_columns(k.scale.at[lax.rem(number, k.scale.shape[0])]), s.shape, [1]
            )
        plgpu.barrier_arrive(k.free.at[stage])
        s, factor = scores(s, options)
        whole = self._is_whole(item, tile)
        s = lax.cond(whole, lambda s: s, partial(self._masked, item, tile), s * factor)
        m_new = jnp.maximum(m, s.max(axis=1))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
        total = total * alpha + (few_lines.line_sums(p) if self.few else p.sum(axis=1))
        if v.scale is not None:
            scales = self._along_columns(v.scale.at[lax.rem(number, v.scale.shape[0])])
            scales = lax.cond(whole, lambda x: x, partial(self._used, item, tile), scales)
            p *= lax.broadcast_in_dim(scales * self._enlarged, p.shape, [1])
        weights = self._operand(p.astype(v.smem.dtype))
        plgpu.barrier_wait(v.full.at[stage])
        accs = [
            accumulate(self._rescaled(acc, alpha), weights, v.smem.at[slot, :, part])
            for acc, part in zip(accs, self._columns, strict=True)
        ]
        plgpu.barrier_arrive(v.free.at[stage])
        return m_new, total, accs

    def _is_whole(self, item: WorkItem, tile: jax.Array) -> jax.Array:
        """Whether all rows of the item see all tokens of its tile."""
        token, window = (item.start + tile) * TILE, self.form.options.window
        whole = token + TILE <= item.length
        return whole if window is None else whole & (token >= item.end - window)

    def _masked(self, item: WorkItem, tile: jax.Array, s: jax.Array) -> jax.Array:
        """Scores without those of tokens that a row does not see."""
        tokens, lengths = tokens_of(item, tile, s.shape, 1, self._layout), self._lengths(item, s.shape)
        return jnp.where(seen(tokens, lengths, lengths, self.form.options.window), s, -jnp.inf)

    def _used(self, item: WorkItem, tile: jax.Array, scales: jax.Array) -> jax.Array:
        """Scales without those of tokens that no row sees, which may be NaN."""
        used = self.feed.used(item, tile, (TILE,), self._layout.reduce(0))
        return jnp.where(used, scales, jnp.zeros_like(scales))

    def _operand(self, weights: jax.Array) -> Any:
        """The left operand of the second product."""
        if self.scratch.p is None:
            return few_lines.all_lines(weights) if self.few else weights
        self.scratch.p[...] = weights
        plgpu.commit_smem()
        return self.scratch.p

    def _for_rows(self, item: WorkItem | Join, do: Callable[[jax.Array], None]) -> None:
        """Does something for each row of the item, given its index there."""
        if self.form.most_rows == 1:
            do(jnp.int32(0))
        else:
            pl.loop(0, item.rows)(do)

    def _lengths(self, item: WorkItem, shape: tuple[int, ...]) -> jax.Array:
        """The length of each line's row, or that of all lines if items have one row."""
        if self.few or self.form.most_rows == 1:
            return item.length
        line = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return lax.broadcast_in_dim(item.length + lax.div(line, self.form.lines), shape, [0])

    def _first_query(self, item: WorkItem | Join, row: jax.Array) -> Any:
        """The first query head of a row of the item."""
        return (item.row + row) * self._heads + item.kv_head * self.form.group

    def _lines(self, row: jax.Array, count: int) -> Any:
        """The first lines of a row of an item."""
        return pl.ds(row * self.form.lines, count)

    def _full(self, row: jax.Array) -> Any:
        pair = self.feed.pair
        return self.scratch.q_full.at[row if pair is None else pair * self.form.most_rows + row]

    def _load_queries(self, item: WorkItem) -> None:
        """Loads the item's queries through shared memory for results: a TMA copy to tiled memory must start
        at a multiple of 8 rows.
        """
        lines, o, q = self.form.lines, self.scratch.o, self.scratch.q
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the previous item's results

        def fetch(row: jax.Array) -> None:
            head = self._first_query(item, row)
            for i, part in enumerate(self._columns):  # zeros beyond the last query
                source, target = self.inputs.q.at[pl.ds(head, lines), part], o.at[i, self._lines(row, lines)]
                plgpu.copy_gmem_to_smem(source, target, self._full(row))

        def take(row: jax.Array) -> None:
            plgpu.barrier_wait(self._full(row))
            span = self._lines(row, lines)
            for i, part in enumerate(self._columns):
                queries = plgpu.load(o.at[i, span], layout=rows_by_warp())
                if q.dtype != o.dtype:
                    queries = (queries.astype(jnp.float32) * QUERY_UNIT).astype(q.dtype)
                store(q.at[span, part], queries)

        self._for_rows(item, fetch)
        self._for_rows(item, take)
        plgpu.commit_smem()

    def _put(self, item: WorkItem, m: jax.Array, total: jax.Array, accs: Accumulators) -> None:
        """Writes the result of a whole pair."""
        o, group, sinks = self.scratch.o, self.form.group, self.inputs.sinks
        if sinks is not None:
            sink = _by_line([sinks[item.kv_head * group + i] * LOG2_E for i in range(group)], self.form.lines)
            maximum = jnp.maximum(m, sink)
            rescale = jnp.exp2(m - maximum)
            inverse = rescale / self._enlarged / (total * rescale + jnp.exp2(sink - maximum))
        else:
            inverse = 1.0 / self._enlarged / jnp.maximum(total, SMALLEST)
        for i, acc in enumerate(accs):
            store(o.at[i], (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(o.dtype))
        plgpu.commit_smem()

        def put(row: jax.Array) -> None:
            out = self.outputs.out.at[pl.ds(self._first_query(item, row), group)]
            copy_rows_out(o.at[:, self._lines(row, group)], out)

        self._for_rows(item, put)

    def _put_part(self, item: WorkItem, m: jax.Array, total: jax.Array, accs: Accumulators) -> None:
        """Stores the result of a part of a pair, and signals it."""
        parts, staged = self.outputs.parts, self.scratch.part
        total = jnp.maximum(total, SMALLEST)
        inverse = 1.0 / self._enlarged / total

        def put(part: Any, row: jax.Array) -> None:
            target = staged.at[self._lines(row, self.form.lines)]
            plgpu.copy_smem_to_gmem(target, parts.at[item.slot + row, :, part])

        store(self.outputs.sums.at[item.slot], m + jnp.log2(total))
        for i, (acc, part) in enumerate(zip(accs, self._columns, strict=True)):
            if i > 0:  # results of earlier items have been copied: see `_load_queries`
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store(staged, acc * lax.broadcast_in_dim(inverse, acc.shape, [0]))
            plgpu.commit_smem()
            self._for_rows(item, partial(put, part))

        @pl.when(item.join >= 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            signal(self.inputs.signals.at[item.join])

    def join_pair(self, index: jax.Array) -> None:
        """Writes the result of a pair whose last part is in this block."""
        pair, group, sinks = Join.read(self.inputs.joins, index), self.form.group, self.inputs.sinks

        @pl.when(pair.parts > 0)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0)
            await_parts(pair, self.inputs.signals.at[index])
            pair_sinks = [] if sinks is None else [sinks[pair.kv_head * group + i] for i in range(group)]

            def put(row: jax.Array) -> None:
                out = self.outputs.out.at[pl.ds(self._first_query(pair, row), group)]
                o = self.scratch.o.at[:, self._lines(row, self.form.lines)]
                join(pair, row, self.outputs.parts, self.outputs.sums, o, out, pair_sinks)

            self._for_rows(pair, put)

    def clear(self, row: jax.Array) -> None:
        """Writes zeros for a row without a sequence."""
        rows, heads, o = self.form.rows, self._heads, self.scratch.o

        @pl.when((row < rows) & (self.inputs.lengths[jnp.minimum(row, rows - 1)] == 0))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i in range(len(self._columns)):
                store(o.at[i], plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), o.dtype), plgpu.Layout.WGMMA))
            plgpu.commit_smem()
            for at in range(0, heads, ROWS):
                some = min(heads - at, ROWS)
                copy_rows_out(o, self.outputs.out.at[pl.ds(row * heads + at, some)])


def _by_line(values: list[jax.Array], lines: int) -> jax.Array:
    """float32 [ROWS] in which every `lines` begin with the scalars; the others are never read back."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    line, result = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout), per_row(MASKED)
    head = lax.rem(line, lines)
    for i, value in enumerate(values):
        result = jnp.where(head == i, value, result)
    return result
