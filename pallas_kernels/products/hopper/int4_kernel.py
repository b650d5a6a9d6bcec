"""The body of the Hopper kernel for products with four-bit weights; see `int4_product`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, in_one_warp, store_transposed
from pallas_kernels.mosaic.refs import Refs
from pallas_kernels.products.groups import GRID
from pallas_kernels.products.hopper.int4_registers import (
    SCALED,
    STEP,
    WORD_LAYOUT,
    add_scaled,
    factor,
    numbers,
)
from pallas_kernels.products.scales_in_registers import columns_of, layout_of_scales
from pallas_kernels.quantization.int4 import SCALES, TILE, WORDS

REGISTERS = 216, 72  # per compute thread and per memory thread, in blocks of 64 rows or more


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        x: [places, in].
        w: int32 [groups, out, words], four-bit numbers.
        scale, offset: float32 [groups, out, groups of inputs]; offset may be None.
        group, start, length: of each block of rows; see `Groups`.
        sums: float32 [groups of inputs, places], of the inputs; None: the tensor cores compute them.
    """

    x: Any
    w: Any
    scale: Any
    group: Any
    start: Any
    length: Any
    offset: Any = None
    sums: Any = None


class Outputs(NamedTuple):
    out: Any  # [splits, places, out], in global memory


class Scratch(NamedTuple):
    """In shared memory. A stage holds a tile, a place a chunk of scales. If weights are scaled before the
    product, a stage holds a chunk and its scales, among others if they are fewer than SCALES; `scale_free`
    and `scale_full` are None.

    Attributes:
        a: [warpgroups, ROWS, TILE], unpacked weights, if products do not read them from registers; else None.
        free, full: barriers of stages.
        offset, scale: float32 [places, outs, SCALES or those of a chunk]; offset may be None.
        ones: [warpgroups, ROWS, COLUMNS], with `a`; else None.
        out: [warpgroups, block, ROWS], results on their way.
        scale_free, scale_full: barriers of places.
        sums: float32 [places, SCALES, block], or None.
        w: int32 [stages, outs, WORDS * tiles of a stage].
        x: [stages, block, TILE * tiles of a stage].
    """

    a: Any
    free: Any
    full: Any
    offset: Any
    ones: Any
    out: Any
    scale_free: Any
    scale_full: Any
    scale: Any
    sums: Any
    w: Any
    x: Any


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        each: chunks of each split.
        chunk: tiles of a chunk.
        group: inputs with a common scale.
        kind: of four-bit numbers.
        scaled: weights are multiplied by their scales before the product, see `add_scaled`.
    """

    each: int
    chunk: int
    group: int
    kind: str
    scaled: bool


def run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, warpgroups = refs.inputs, refs.scratch.out.shape[0]
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    group, start, length = inputs.group[index], inputs.start[index], inputs.length[index]
    first_out, first = part * warpgroups * ROWS, split * form.each
    chunks = jnp.minimum(form.each, inputs.x.shape[1] // (form.chunk * TILE) - first)
    outputs = pl.ds(warpgroup * ROWS, ROWS)
    place = WarpgroupPlace(group, start, length, first_out, first, chunks, split, warpgroup)
    block = ThreadBlock(refs, form, place, outputs)
    pl.when((length > 0) & (warpgroup < warpgroups))(block.compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(block.memory)


class WarpgroupPlace(NamedTuple):
    """What a warpgroup computes, as int32 scalars.

    Attributes:
        group: index of the matrix.
        start, length: the block's first row, and number of rows, in units of GRID.
        first_out: the block's first output.
        first, chunks: the first chunk of inputs, and the number of chunks.
        split: index of the split of the inputs.
        warpgroup: index of the warpgroup.
    """

    group: jax.Array
    start: jax.Array
    length: jax.Array
    first_out: jax.Array
    first: jax.Array
    chunks: jax.Array
    split: jax.Array
    warpgroup: jax.Array


@dataclass(frozen=True)
class ThreadBlock:
    """A thread block; outputs: those of the block that a compute warpgroup computes."""

    refs: Refs[Inputs, Outputs, Scratch]
    form: Form
    place: WarpgroupPlace
    outputs: Any

    @property
    def _rows(self) -> int:
        rows: int = self.refs.scratch.x.shape[1]
        return rows

    @property
    def _warpgroups(self) -> int:
        warpgroups: int = self.refs.scratch.out.shape[0]
        return warpgroups

    @property
    def _in_tile(self) -> int:
        """Groups of inputs in a tile."""
        return TILE // self.form.group

    @property
    def _piece(self) -> int:
        """Inputs of an operand of the tensor cores."""
        return min(self.form.group, COLUMNS)

    @property
    def _in_registers(self) -> bool:
        return self.refs.scratch.a is None

    def compute(self) -> None:
        scratch, place, block = self.refs.scratch, self.place, self._rows
        if block >= COLUMNS and self._warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        if self.form.scaled:
            y = self._in_one_sum() * SCALED
        else:
            tiles = place.chunks * self.form.chunk
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), plgpu.Layout.WGMMA)
            y = lax.fori_loop(0, tiles, partial(self._fold, self._ones()), zeros)
        mine = scratch.out.at[place.warpgroup]
        store_transposed(mine, y.astype(scratch.out.dtype))
        plgpu.commit_smem()
        outputs = pl.ds(place.first_out + place.warpgroup * ROWS, ROWS)
        at: Any = 0
        size = block // GRID
        while size:  # the length of a copy must be static
            taken, some = place.length & size, pl.ds(at * GRID, size * GRID)
            to = self.refs.outputs.out.at[place.split, pl.ds((place.start + at) * GRID, size * GRID), outputs]
            pl.when(taken > 0)(partial(plgpu.copy_smem_to_gmem, mine.at[some], to))
            at, size = at + taken, size // 2
        plgpu.wait_smem_to_gmem(0)

    def _in_one_sum(self) -> jax.Array:
        """The sum of chunks of weights that are scaled first."""
        scratch, chunks = self.refs.scratch, self.place.chunks
        stages = scratch.x.shape[0]

        def of_tile(ref: Any, slot: int, columns: Any) -> Any:
            layout = layout_of_scales(self._in_tile)
            at = None if ref is None else ref.at[slot, self.outputs, columns]
            return at and plgpu.load(at, layout=layout, optimized=False)

        def add(slot: int, number: jax.Array, total: jax.Array) -> jax.Array:
            first, in_tile = self._first_scale(number), self._in_tile
            plgpu.barrier_wait(scratch.full.at[slot])
            for tile in range(self.form.chunk):
                columns = pl.ds(first + tile * in_tile, in_tile)
                scale, offset = (of_tile(ref, slot, columns) for ref in (scratch.scale, scratch.offset))
                w = scratch.w.at[slot, self.outputs, pl.ds(tile * WORDS, WORDS)]
                words = plgpu.load(w, layout=WORD_LAYOUT)
                # waits for each tile: with more weights in registers, fewer blocks fit
                total = add_scaled(total, words, scale, offset, scratch.x.at[slot], tile, self.form.kind)
            plgpu.barrier_arrive(scratch.free.at[slot])
            return total

        def turn(turn: jax.Array, total: jax.Array) -> jax.Array:
            for slot in range(stages):  # constant: addresses and phases take fewer instructions
                number = turn * stages + slot
                total = lax.cond(number < chunks, partial(add, slot, number), lambda total: total, total)
            return total

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self._rows), jnp.float32), plgpu.Layout.WGMMA)
        total: jax.Array = lax.fori_loop(0, lax.div(chunks + stages - 1, stages), turn, zeros)
        return total

    def _first_scale(self, number: jax.Array) -> Any:
        """The first of a chunk's scales among those that come with it."""
        scales, columns = self.form.chunk * self._in_tile, self.refs.scratch.scale.shape[2]
        return 0 if scales == columns else lax.rem((self.place.first + number) * scales, columns)

    def _ones(self) -> Any:
        """An operand of the tensor cores."""
        scratch, warpgroup, piece = self.refs.scratch, self.place.warpgroup, self._piece
        ones: Any = jnp.ones((ROWS, piece), scratch.x.dtype)
        if self._in_registers:
            return plgpu.layout_cast(ones, plgpu.Layout.WGMMA)
        scratch.ones[warpgroup, :, :piece] = ones
        plgpu.commit_smem()
        return scratch.ones.at[warpgroup, :, pl.ds(0, piece)]

    def _fold(self, ones: Any, step: jax.Array, total: jax.Array) -> jax.Array:
        """Adds a tile's products, scaled."""
        scratch, chunk, in_tile, kind = self.refs.scratch, self.form.chunk, self._in_tile, self.form.kind
        stages, places = scratch.x.shape[0], scratch.scale.shape[0]
        slot, place, inside = (
            lax.rem(step, stages),
            lax.rem(lax.div(step, chunk), places),
            lax.rem(step, chunk),
        )
        plgpu.barrier_wait(scratch.full.at[slot])
        words = plgpu.load(scratch.w.at[slot, self.outputs], layout=WORD_LAYOUT)
        pl.when(inside == 0)(partial(plgpu.barrier_wait, scratch.scale_full.at[place]))
        at_once = max(1, min(in_tile, 2 if self._rows < COLUMNS else 1))  # groups
        for begin in range(0, in_tile, at_once):
            some = range(begin, begin + at_once)
            for group, y in zip(some, self._products(slot, some, partial(self._operand, words)), strict=True):
                total += y * (self._of_outputs(scratch.scale, place, inside, group) * factor(kind))
                if scratch.offset is not None:
                    offset = self._of_outputs(scratch.offset, place, inside, group)
                    total += offset * self._sums(ones, slot, place, inside, group)
        # on a GPU the barrier orders these loads before the next copy; the interpreter needs a fence
        if not self._in_registers:
            plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.free.at[slot])
        pl.when(inside == chunk - 1)(partial(plgpu.barrier_arrive, scratch.scale_free.at[place]))
        return total

    def _operand(self, words: Any, first: int) -> Any:
        """Unpacked weights of a piece of a tile, as an operand of the tensor cores."""
        scratch, piece = self.refs.scratch, self._piece
        steps = range(first // STEP, (first + piece) // STEP)
        mine = numbers(words, steps, self.form.kind, scratch.x.dtype, self._in_registers)
        if self._in_registers:
            return mine
        place = scratch.a.at[self.place.warpgroup, :, pl.ds(first, piece)]
        place[...] = mine
        plgpu.commit_smem()
        return place

    def _products(self, slot: Any, some: Sequence[int], operand: Callable[[int], Any]) -> list[jax.Array]:
        """Products of some of a tile's groups with operands for their inputs, [64, block] each."""
        x, size, piece = self.refs.scratch.x, self.form.group, self._piece

        def multiply(*sums: Any) -> list[jax.Array]:
            for group, acc in zip(some, sums, strict=True):
                for first in range(group * size, (group + 1) * size, piece):
                    columns = x.at[slot, :, pl.ds(first, piece)]
                    plgpu.wgmma(acc, operand(first), columns.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [acc[...] for acc in sums]

        accumulators = [plgpu.WGMMAAccumulatorRef((ROWS, self._rows), jnp.float32) for _ in some]
        products: list[jax.Array] = pl.run_scoped(multiply, *accumulators)
        return products

    def _of_outputs(self, ref: Any, place: Any, inside: Any, group: int) -> jax.Array:
        """Scales or offsets of a group in tile `inside` of the chunk, broadcast to [64, block]."""
        loaded = plgpu.load(ref.at[place, self.outputs], layout=layout_of_scales(SCALES), optimized=False)
        if self._in_registers:
            columns = columns_of(loaded, plgpu.Layout.WGMMA.reduce(1))
        else:
            columns = [loaded[:, column] for column in range(SCALES)]
        lines = columns[group :: self._in_tile]
        line = lines[0]
        for tile in range(1, self.form.chunk):
            line = jnp.where(jnp.broadcast_to(inside == tile, line.shape), lines[tile], line)
        return lax.broadcast_in_dim(line, (ROWS, self._rows), [0])

    def _sums(self, ones: Any, slot: Any, place: Any, inside: Any, group: int) -> jax.Array:
        """Sums of the rows' inputs in one of a tile's groups, the same for all outputs, [64, block]."""
        sums = self.refs.scratch.sums
        if sums is None:
            return self._products(slot, [group], lambda first: ones)[0]
        line = plgpu.load(sums.at[place, inside * self._in_tile + group], layout=plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(line, (ROWS, self._rows), [1])

    def memory(self) -> None:
        """Copies tiles and chunks, as far ahead of the compute warpgroups as shared memory allows."""
        if self._rows >= COLUMNS and self._warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        in_one_warp(self._copy)

    def _copy(self) -> None:
        inputs, scratch, at, chunk = self.refs.inputs, self.refs.scratch, self.place, self.form.chunk
        stages, places, size = scratch.x.shape[0], scratch.scale.shape[0], scratch.x.shape[2]
        together, tiles = scratch.scale_full is None, size // TILE  # a stage's
        outs, rows = pl.ds(at.first_out, self._warpgroups * ROWS), pl.ds(at.start * GRID, self._rows)
        count = at.chunks * (chunk // tiles)

        def copy(slot: int, i: jax.Array) -> None:
            number = at.first * (chunk // tiles) + i
            # inputs beyond the last tile are zeros, and so are copies of them
            stored = number if together else jnp.minimum(number, inputs.w.shape[-1] // WORDS - 1)
            if not together:
                pl.when(lax.rem(i, chunk) == 0)(partial(self._copy_scales, outs, rows, lax.div(i, chunk)))
            pl.when(i >= stages)(partial(plgpu.barrier_wait, scratch.free.at[slot]))
            copies = [
                (inputs.w.at[at.group, outs], scratch.w, stored),
                (inputs.x.at[rows], scratch.x, number),
            ]
            if together:
                piece = lax.div(number * chunk * self._in_tile, scratch.scale.shape[2])
                scales = (inputs.scale, scratch.scale), (inputs.offset, scratch.offset)
                copies += [(source.at[at.group, outs], to, piece) for source, to in scales if to is not None]
            for source, target, piece in copies:
                columns = pl.ds(piece * target.shape[2], target.shape[2])
                plgpu.copy_gmem_to_smem(source.at[:, columns], target.at[slot], scratch.full.at[slot])

        @pl.loop(0, lax.div(count + stages - 1, stages))
        def _(turn: jax.Array) -> None:
            for slot in range(stages):
                i = turn * stages + slot
                pl.when(i < count)(partial(copy, slot, i))

        # Wait for each slot's last release: every barrier phase must be observed.
        pl.loop(0, jnp.minimum(count, stages))(lambda slot: plgpu.barrier_wait(scratch.free.at[slot]))
        if not together:
            pl.loop(0, jnp.minimum(at.chunks, places))(
                lambda place: plgpu.barrier_wait(scratch.scale_free.at[place])
            )

    def _copy_scales(self, outs: Any, rows: Any, number: Any) -> None:
        """Copies a chunk's scales, offsets and sums."""
        inputs, scratch, places = self.refs.inputs, self.refs.scratch, self.refs.scratch.scale.shape[0]
        place, columns = lax.rem(number, places), pl.ds((self.place.first + number) * SCALES, SCALES)
        full = scratch.scale_full.at[place]
        pl.when(number >= places)(partial(plgpu.barrier_wait, scratch.scale_free.at[place]))
        plgpu.copy_gmem_to_smem(
            inputs.scale.at[self.place.group, outs, columns], scratch.scale.at[place], full
        )
        if inputs.offset is not None:
            plgpu.copy_gmem_to_smem(
                inputs.offset.at[self.place.group, outs, columns], scratch.offset.at[place], full
            )
        if inputs.sums is not None:
            plgpu.copy_gmem_to_smem(inputs.sums.at[columns, rows], scratch.sums.at[place], full)
