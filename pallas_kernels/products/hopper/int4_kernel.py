"""The body of the Hopper kernel for products with four-bit weights; see `int4_product`."""

from __future__ import annotations

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
from pallas_kernels.products.four_bit_numbers import SCALED
from pallas_kernels.products.groups import GRID
from pallas_kernels.products.hopper.int4_registers import WORD_LAYOUT, add_scaled
from pallas_kernels.products.scales_in_registers import layout_of_scales
from pallas_kernels.quantization.int4 import TILE, WORDS

REGISTERS = 216, 72  # per compute thread and per memory thread, in blocks of 64 rows or more


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        x: [places, in].
        w: int32 [groups, out, words], four-bit numbers.
        scale, offset: float32 [groups, out, groups of inputs]; offset may be None.
        group, start, length: of each block of rows; see `Groups`.
    """

    x: Any
    w: Any
    scale: Any
    group: Any
    start: Any
    length: Any
    offset: Any = None


class Outputs(NamedTuple):
    out: Any  # [splits, places, out], in global memory


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        free, full: barriers of stages.
        offset, scale: float32 [stages, outs, SCALES or those of a stage]; offset may be None.
        out: [warpgroups, block, ROWS], results on their way.
        w: int32 [stages, outs, WORDS * tiles of a stage].
        x: [stages, block, TILE * tiles of a stage].
    """

    free: Any
    full: Any
    offset: Any
    out: Any
    scale: Any
    w: Any
    x: Any


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        each: stages of each split.
        group: inputs with a common scale.
        kind: of four-bit numbers.
    """

    each: int
    group: int
    kind: str


def run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, warpgroups = refs.inputs, refs.scratch.out.shape[0]
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    group, start, length = inputs.group[index], inputs.start[index], inputs.length[index]
    first_out, first = part * warpgroups * ROWS, split * form.each
    count = jnp.minimum(form.each, inputs.x.shape[1] // refs.scratch.x.shape[2] - first)
    outputs = pl.ds(warpgroup * ROWS, ROWS)
    place = WarpgroupPlace(group, start, length, first_out, first, count, split, warpgroup)
    block = ThreadBlock(refs, form, place, outputs)
    pl.when((length > 0) & (warpgroup < warpgroups))(block.compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(block.memory)


class WarpgroupPlace(NamedTuple):
    """What a warpgroup computes, as int32 scalars.

    Attributes:
        group: index of the matrix.
        start, length: the block's first row, and number of rows, in units of GRID.
        first_out: the block's first output.
        first, stages: the first stage of inputs, and the number of stages.
        split: index of the split of the inputs.
        warpgroup: index of the warpgroup.
    """

    group: jax.Array
    start: jax.Array
    length: jax.Array
    first_out: jax.Array
    first: jax.Array
    stages: jax.Array
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
    def _tiles(self) -> int:
        """Tiles of a stage."""
        tiles: int = self.refs.scratch.x.shape[2] // TILE
        return tiles

    def compute(self) -> None:
        scratch, place, block = self.refs.scratch, self.place, self._rows
        if block >= COLUMNS and self._warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        y = self._total() * SCALED[str(scratch.x.dtype)]
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

    def _total(self) -> jax.Array:
        """The sum of stages' products, in units of SCALED."""
        scratch, count, in_tile = self.refs.scratch, self.place.stages, self._in_tile
        stages = scratch.x.shape[0]

        def of_tile(ref: Any, slot: int, some: Any) -> Any:
            at = ref.at[slot, self.outputs, some]
            return plgpu.load(at, layout=layout_of_scales(in_tile), optimized=False)

        def add(slot: int, number: jax.Array, total: jax.Array) -> jax.Array:
            scales, columns = self._tiles * in_tile, scratch.scale.shape[2]
            # of the scales that come with the stage, some may be others'
            first: Any = 0 if scales == columns else lax.rem((self.place.first + number) * scales, columns)
            plgpu.barrier_wait(scratch.full.at[slot])
            for tile in range(self._tiles):
                some = pl.ds(first + tile * in_tile, in_tile)
                of_groups = [
                    of_tile(ref, slot, some) for ref in (scratch.scale, scratch.offset) if ref is not None
                ]
                w = scratch.w.at[slot, self.outputs, pl.ds(tile * WORDS, WORDS)]
                words = plgpu.load(w, layout=WORD_LAYOUT)
                # waits for each tile: with more weights in registers, fewer blocks fit
                total = add_scaled(total, words, of_groups, scratch.x.at[slot], tile, self.form.kind)
            plgpu.barrier_arrive(scratch.free.at[slot])
            return total

        def turn(turn: jax.Array, total: jax.Array) -> jax.Array:
            for slot in range(stages):  # constant: addresses and phases take fewer instructions
                number = turn * stages + slot
                total = lax.cond(number < count, partial(add, slot, number), lambda total: total, total)
            return total

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, self._rows), jnp.float32), plgpu.Layout.WGMMA)
        total: jax.Array = lax.fori_loop(0, lax.div(count + stages - 1, stages), turn, zeros)
        return total

    def memory(self) -> None:
        """Copies stages, as far ahead of the compute warpgroups as shared memory allows."""
        if self._rows >= COLUMNS and self._warpgroups == 2:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        in_one_warp(self._copy)

    def _copy(self) -> None:
        inputs, scratch, place = self.refs.inputs, self.refs.scratch, self.place
        stages, columns = scratch.x.shape[0], scratch.scale.shape[2]
        outs, rows = pl.ds(place.first_out, self._warpgroups * ROWS), pl.ds(place.start * GRID, self._rows)

        def copy(slot: int, i: jax.Array) -> None:
            number = place.first + i
            scales = lax.div(number * self._tiles * self._in_tile, columns)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, scratch.free.at[slot]))
            # beyond the last tile, copies are zeros
            copies = [
                (inputs.w.at[place.group, outs], scratch.w, number),
                (inputs.x.at[rows], scratch.x, number),
                (inputs.scale.at[place.group, outs], scratch.scale, scales),
            ]
            if inputs.offset is not None:
                copies.append((inputs.offset.at[place.group, outs], scratch.offset, scales))
            for source, target, piece in copies:
                some = pl.ds(piece * target.shape[2], target.shape[2])
                plgpu.copy_gmem_to_smem(source.at[:, some], target.at[slot], scratch.full.at[slot])

        @pl.loop(0, lax.div(place.stages + stages - 1, stages))
        def _(turn: jax.Array) -> None:
            for slot in range(stages):
                i = turn * stages + slot
                pl.when(i < place.stages)(partial(copy, slot, i))

        # Wait for each slot's last release: every barrier phase must be observed.
        pl.loop(0, jnp.minimum(place.stages, stages))(lambda slot: plgpu.barrier_wait(scratch.free.at[slot]))
