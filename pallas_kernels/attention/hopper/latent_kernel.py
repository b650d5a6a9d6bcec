"""The body of the Hopper kernel for latent decode attention; see `latent.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.decode_feed import WorkItem
from pallas_kernels.attention.hopper.join import Join, await_parts, join
from pallas_kernels.attention.softmax import LOG2_E, MASKED, SMALLEST
from pallas_kernels.attention.work_list import TILE
from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, per_row, product
from pallas_kernels.mosaic.refs import Refs
from pallas_kernels.mosaic.semaphores import signal
from pallas_kernels.mosaic.versions import store

HALVES = 2  # compute warpgroups; each keeps this part of the result's columns
STAGES = 2  # tiles in flight
REGISTERS = 224, 56  # per compute thread and per memory thread


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        q: [rows, padded heads, key_dim].
        pages: [num_pages, 1, page_size, key_dim].
        tables, lengths: int32 [rows, width] and [rows].
        first, items, joins, signals: of the work list.
    """

    q: Any
    pages: Any
    tables: Any
    lengths: Any
    first: Any
    items: Any
    joins: Any
    signals: Any


class Outputs(NamedTuple):
    """In global memory.

    Attributes:
        out: [rows, padded heads, rank].
        parts: float32 [slots, group, rank], normalized results of parts of pairs.
        sums: float32 [slots, ROWS], base-2 logarithms of the parts' softmax sums.
    """

    out: Any
    parts: Any
    sums: Any


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        factors: float32 [ROWS], which scale the second warpgroup's earlier sums.
        free, full: barriers of stages; `full` has one more, for tiles that are cleared before they are
            released.
        given, taken: barriers of factors and weights.
        q_full: the barrier of queries.
        shared: one piece of memory for queries [ROWS, key_dim], for results and parts of results by half
            [HALVES, ROWS, columns], and for a joined result [rank // COLUMNS, ROWS, COLUMNS].
        tiles: [STAGES, TILE, key_dim].
        weights: [ROWS, TILE].
    """

    factors: Any
    free: Any
    full: Any
    given: Any
    q_full: Any
    shared: Any
    taken: Any
    tiles: Any
    weights: Any


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        group: heads of a block of heads.
        rank: channels of a value.
        scale: multiplies the scores.
        in_place: products add to their accumulators in place.
    """

    group: int
    rank: int
    scale: float
    in_place: bool


def run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    mine = ComputeGroups(refs.inputs, refs.outputs, refs.scratch, form, block)

    @pl.when(warpgroup == HALVES)
    def memory() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _feed(refs.inputs, refs.scratch, *mine.bounds(), form.rank)

    @pl.when(warpgroup == 1)
    def follow() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        lax.fori_loop(*mine.bounds(), mine.follow, jnp.int32(0))

    @pl.when(warpgroup == 0)
    def lead() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        lax.fori_loop(*mine.bounds(), mine.lead, jnp.int32(0))
        first, (rows, *_) = refs.inputs.first, refs.inputs.q.shape
        pl.loop(0, pl.cdiv(rows, first.shape[0] - 1))(mine.clear)
        pl.loop(first[block, 1], first[block + 1, 1])(mine.join_pair)


@dataclass(frozen=True)
class ComputeGroups:
    """The compute warpgroups of a thread block. The first leads: it computes scores and weights, and half of
    each result; the second follows with the other half.
    """

    inputs: Inputs
    outputs: Outputs
    scratch: Scratch
    form: Form
    block: jax.Array

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """The block's items. Each warpgroup reads them itself: registers that all share would be spilled."""
        return self.inputs.first[self.block, 0], self.inputs.first[self.block + 1, 0]

    def lead(self, index: jax.Array, done: jax.Array) -> jax.Array:
        """The first warpgroup's part of an item, given the number of tiles before it in the block; returns
        that after it.
        """
        item = WorkItem.read(self.inputs.items, index)
        queries, *_ = self.scratch.shared
        source = self.inputs.q.at[item.row, self._heads_of(item)]
        plgpu.copy_gmem_to_smem(source, queries.at[pl.ds(0, self.form.group)], self.scratch.q_full)
        plgpu.barrier_wait(self.scratch.q_full)
        left = item.length - item.start * TILE  # tokens from the first tile on
        start = per_row(MASKED), per_row(0.0), self._zeros()
        m, total, acc = lax.fori_loop(0, item.tiles, partial(self._fold, done, left), start)
        total = jnp.maximum(total, SMALLEST)
        inverse = 1.0 / total
        self._give(item.tiles, inverse)
        # read again: keeping it during the loop would take registers
        item = WorkItem.read(self.inputs.items, index)
        pl.when(item.slot >= 0)(lambda: store(self.outputs.sums.at[item.slot], m + jnp.log2(total)))
        self._put(0, item, _scaled(acc, inverse))
        plgpu.barrier_wait(self.scratch.taken)  # the second warpgroup's results have left the queries' memory
        pl.when(item.join >= 0)(lambda: signal(self.inputs.signals.at[item.join]))
        return done + item.tiles

    def _fold(self, done: jax.Array, left: jax.Array, tile: jax.Array, carry: Any) -> Any:
        """Folds a tile into the softmax: the rows' maxima, their sums, and the first half's sums of weighted
        values.
        """
        m, total, acc = carry
        (queries, *_), tiles = self.scratch.shared, self.scratch.tiles
        slot = lax.rem(done + tile, STAGES)
        plgpu.barrier_wait(self.scratch.full.at[slot])
        s = product(queries, tiles.at[slot].transpose((1, 0)))
        tokens = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)
        s = jnp.where(tokens < left - tile * TILE, s * (self.form.scale * LOG2_E), -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
        total = total * alpha + p.sum(axis=1)
        self._give(tile, alpha, p.astype(self.inputs.q.dtype))
        acc = self._add(_scaled(acc, alpha), tiles.at[slot, :, self._columns(0)])
        plgpu.barrier_arrive(self.scratch.free.at[slot])
        return m_new, total, acc

    def _give(self, number: jax.Array, factor: jax.Array, p: jax.Array | None = None) -> None:
        """Passes a factor of earlier sums, and a tile's weights, to the second warpgroup, once it has taken
        those before.
        """
        pl.when(number > 0)(partial(plgpu.barrier_wait, self.scratch.taken))
        store(self.scratch.factors, factor)
        if p is not None:
            self.scratch.weights[...] = p
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch.given)

    def follow(self, index: jax.Array, done: jax.Array) -> jax.Array:
        """The second warpgroup's part of an item; see `lead`."""
        item, scratch = WorkItem.read(self.inputs.items, index), self.scratch

        def fold(tile: jax.Array, acc: jax.Array) -> jax.Array:
            slot = lax.rem(done + tile, STAGES)
            acc = self._add(_scaled(acc, self._take()), scratch.tiles.at[slot, :, self._columns(1)])
            plgpu.barrier_arrive(scratch.taken)
            plgpu.barrier_arrive(scratch.free.at[slot])
            return acc

        acc = lax.fori_loop(0, item.tiles, fold, self._zeros())
        self._put(1, item, _scaled(acc, self._take()))
        plgpu.barrier_arrive(scratch.taken)
        return done + item.tiles

    def _take(self) -> jax.Array:
        """The factor that the first warpgroup has given."""
        plgpu.barrier_wait(self.scratch.given)
        factor: jax.Array = plgpu.load(self.scratch.factors, layout=plgpu.Layout.WGMMA.reduce(1))
        return factor

    def _add(self, acc: jax.Array, values: Any) -> jax.Array:
        """acc + weights @ values."""
        weights = self.scratch.weights
        if not self.form.in_place:
            return acc + product(weights, values)
        total: jax.Array = pl.run_state(lambda out: plgpu.wgmma(out, weights, values))(
            plgpu.WGMMAAccumulatorRef.init(acc)
        )
        return total

    @property
    def _half(self) -> int:
        return self.form.rank // HALVES

    def _zeros(self) -> jax.Array:
        zeros: jax.Array = plgpu.layout_cast(jnp.zeros((ROWS, self._half), jnp.float32), plgpu.Layout.WGMMA)
        return zeros

    def _columns(self, which: int, at: int = 0, count: int | None = None) -> Any:
        """Columns of a half of the result."""
        return pl.ds(which * self._half + at, self._half if count is None else count)

    def _heads_of(self, item: WorkItem | Join) -> Any:
        return pl.ds(item.kv_head * self.form.group, self.form.group)

    def _put(self, which: int, item: WorkItem, acc: jax.Array) -> None:
        """Stores a warpgroup's half of normalized results."""
        (_, results, part_results, _), some, half = self.scratch.shared, pl.ds(0, self.form.group), self._half

        @pl.when(item.slot < 0)
        def whole() -> None:
            results[which] = acc.astype(self.inputs.q.dtype)
            plgpu.commit_smem()
            to = self.outputs.out.at[item.row, self._heads_of(item), self._columns(which)]
            plgpu.copy_smem_to_gmem(results.at[which, some], to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(item.slot >= 0)
        def part() -> None:
            for at in range(0, half, half // 2):
                part_results[which] = acc[:, at : at + half // 2]
                plgpu.commit_smem()
                to = self.outputs.parts.at[item.slot, :, self._columns(which, at, half // 2)]
                plgpu.copy_smem_to_gmem(part_results.at[which, some], to)
                plgpu.wait_smem_to_gmem(0)  # before the join

    def clear(self, turn: jax.Array) -> None:
        """Writes zeros for a row without a sequence."""
        inputs, group = self.inputs, self.form.group
        rows, heads, _ = inputs.q.shape
        row = self.block + turn * (inputs.first.shape[0] - 1)

        @pl.when((row < rows) & (inputs.lengths[jnp.minimum(row, rows - 1)] == 0))
        def write() -> None:
            results = self.scratch.shared[1]
            results[0] = self._zeros().astype(inputs.q.dtype)
            plgpu.commit_smem()
            for at in range(0, heads, group):
                for which in range(HALVES):
                    to = self.outputs.out.at[row, pl.ds(at, group), self._columns(which)]
                    plgpu.copy_smem_to_gmem(results.at[0, pl.ds(0, group)], to)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def join_pair(self, index: jax.Array) -> None:
        """Writes the result of a pair whose last part is in this block."""
        pair, outputs = Join.read(self.inputs.joins, index), self.outputs

        @pl.when(pair.parts > 0)
        def _() -> None:
            *_, joined = self.scratch.shared
            out = outputs.out.at[pair.row, self._heads_of(pair)]
            await_parts(pair, self.inputs.signals.at[index])
            some = joined.at[:, pl.ds(0, self.form.group)]
            join(pair, 0, outputs.parts, outputs.sums, some, out, [])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scaled(acc: jax.Array, factor: jax.Array) -> jax.Array:
    """The rows of acc times the factors."""
    return acc * lax.broadcast_in_dim(factor, acc.shape, [0])


def _feed(inputs: Inputs, scratch: Scratch, first: jax.Array, end: jax.Array, rank: int) -> None:
    """Copies all tiles of the items. Returns when every slot is free again, so that every barrier phase is
    observed.
    """
    tiles, full, free = scratch.tiles, scratch.full, scratch.free
    page_size = inputs.pages.shape[2]
    piece = min(page_size, TILE)  # tokens per copy

    def one_item(index: jax.Array, done: jax.Array) -> jax.Array:
        item = WorkItem.read(inputs.items, index)
        last = lax.div(item.length - 1, page_size)

        @pl.loop(0, item.tiles)
        def one_tile(tile: jax.Array) -> None:
            number, token = done + tile, (item.start + tile) * TILE
            slot, whole = lax.rem(number, STAGES), token + TILE <= item.length
            ids = [
                inputs.tables[item.row, jnp.minimum(lax.div(token + at, page_size), last)]
                for at in range(0, TILE, piece)
            ]
            pl.when(number >= STAGES)(partial(plgpu.barrier_wait, free.at[slot]))
            for at, page in zip(range(0, TILE, piece), ids, strict=True):
                source = inputs.pages.at[
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
