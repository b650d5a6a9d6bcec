"""Products with weights of any format, as a Pallas Mosaic GPU kernel for `mma.sync`: each row by the matrix
of its group.

A dense product has a single group. A thread block, one warpgroup, computes a block of rows and 64 outputs. It
copies tiles of 128 inputs several ahead of the computation: with cp.async or, where Pallas has none, with
TMA. Weights are the left side, so that few rows waste little, and each warp reads a separate part of them. A
thread unpacks them in its registers, without exchanging data between lanes (see `mosaic/ampere.py`), so they
are read once per block of rows and never stored unpacked. Four-bit numbers are multiplied by their scales
there; unpacked numbers of eight bits are exact, and the sum over inputs with a common scale is multiplied by
that scale in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.devices import traced_for
from pallas_kernels.mosaic.ampere import (
    DEPTH,
    INPUTS,
    NUMBERS,
    ROWS,
    copy,
    fragment,
    left_registers,
    left_side,
    right_side,
    tiled,
)
from pallas_kernels.mosaic.refs import Refs, body
from pallas_kernels.mosaic.versions import store
from pallas_kernels.mosaic.words import pair_of, words_of
from pallas_kernels.products.four_bit_numbers import SCALED, ScaledNumbers
from pallas_kernels.products.groups import GRID, Groups, input_splits, one_group
from pallas_kernels.products.scales_in_registers import columns_of, elements, layout_of_scales
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.int4 import KINDS, SCALES, TILE, WORDS, Int4
from pallas_kernels.targets import has_tma

load = partial(plgpu.load, optimized=False)  # jax 0.11.2 requires this for global memory
STAGES = 4  # maximum tiles in shared memory
MOST_ROWS = 64  # of a thread block, for which registers suffice
BLOCKS = 4  # desired thread blocks per multiprocessor
SHARED = 96 << 10  # bytes for their tiles, of which each block has at least two
LEAST_TILES = 4  # minimum tiles per block if several blocks share a product's inputs
OUTS = ROWS  # of a warpgroup
PACKED = plgpu.Layout.TILED(  # int32 [OUTS, 16], four-bit numbers
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
SUMS = plgpu.Layout.MMA_ACC(np.dtype("float16"))  # [OUTS, rows]
APART = plgpu.Layout.TILED(  # sums [OUTS, GRID], a number in each register
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)


class Inputs(NamedTuple):
    """In global memory.

    Attributes:
        x: [places, in].
        w: [groups, out, words].
        group, start, length: of each block of rows; see `Groups`.
        scale, offset: float32 [groups, out, groups of inputs]; None: scales are ones, offsets zeros.
    """

    x: Any
    w: Any
    group: Any
    start: Any
    length: Any
    scale: Any = None
    offset: Any = None


class Outputs(NamedTuple):
    out: Any  # [splits, places, out], in global memory


class Scratch(NamedTuple):
    """In shared memory.

    Attributes:
        w: [stages, OUTS, words of a tile].
        x: [stages, block, TILE].
        landed: with TMA, a barrier for the copies to each stage.
    """

    w: Any
    x: Any
    landed: Any = None


@dataclass(frozen=True)
class Form:
    """The form of the kernel.

    Attributes:
        each: chunks of each split.
        scaled: inputs with a common scale; 0: all.
        kind: of the weight's numbers.
        parts: thread blocks for the rows of a block of `Groups`.
    """

    each: int
    scaled: int
    kind: str
    parts: int

    @property
    def tiles(self) -> int:
        """Tiles of a chunk, which has a multiple of SCALES scales."""
        return max(1, SCALES * self.scaled // TILE)

    @property
    def scales(self) -> int:
        """Scales of a chunk."""
        return self.tiles * TILE // self.scaled if self.scaled else 0


class Matrices(NamedTuple):
    """Weights of groups.

    Attributes:
        values: [groups, out, in] of eight or sixteen bits, in a multiple of TILE; or of an `Int4` in one
            part. The number of outputs is a multiple of OUTS.
        kind: of the numbers.
        scale: float32, of outputs [groups, out], or of `scaled` inputs each, [groups, out, n]; None: ones.
        offset: of four-bit numbers, as scale; None: zeros.
        scaled: inputs with a common scale; 0: all.
    """

    values: jax.Array
    kind: str
    scale: jax.Array | None = None
    offset: jax.Array | None = None
    scaled: int = 0

    @property
    def words(self) -> int:
        """Values of a tile."""
        return WORDS if self.kind in KINDS else TILE


def matrices_of(weight: Int4) -> Matrices:
    """The matrices of a weight [groups, out, in] in one part."""
    return Matrices(weight.values, weight.kind, weight.scale, weight.offset, weight.group)


def product(x: jax.Array, weight: Matrices, *, dtype: jax.typing.DTypeLike, cores: int) -> jax.Array:
    """Multiplies rows by the matrix of a single group.

    Args:
        x: bfloat16 or float16 [rows, in], with the weight's transform applied.
        dtype: of the result.
        cores: multiprocessors of the device. With few outputs, several thread blocks share the inputs, and
            XLA adds their partial sums.

    Returns:
        [rows, out].
    """
    (rows, size), outs = x.shape, weight.values.shape[1]
    groups, block = one_group(rows)
    bits = 32 // (TILE // WORDS) if weight.kind in KINDS else 8 * weight.values.dtype.itemsize
    blocks = len(groups.group) * outs // OUTS
    splits = input_splits(blocks, rows, size, bits, TILE * LEAST_TILES, BLOCKS // 2 * cores)
    x = jnp.pad(x, ((0, -rows % block), (0, 0)))
    y = _products(x, weight, groups, block, splits, jnp.dtype(jnp.float32 if splits > 1 else dtype))
    return (y[0] if splits == 1 else y.sum(0).astype(dtype))[:rows]


def grouped_product(x: jax.Array, weight: Matrices, groups: Groups) -> jax.Array:
    """Multiplies each row by the matrix of its group.

    Args:
        x: bfloat16 or float16 [places, in], in the order of `groups`, with the weight's transform applied.
        groups: from `groups.grouped`.

    Returns:
        [places, out], in x's dtype; undefined in places without a row.
    """
    return _products(x, weight, groups, groups.block, 1, x.dtype)[0]


def _products(
    x: jax.Array, weight: Matrices, groups: Groups, block: int, splits: int, dtype: jnp.dtype[Any]
) -> jax.Array:
    """The partial sums of each split of the inputs: [splits, places, out]."""
    outs, words = weight.values.shape[1], weight.words
    rows = min(block, MOST_ROWS)
    form = Form(0, weight.scaled, weight.kind, block // rows)
    chunks = -(-x.shape[1] // (form.tiles * TILE))
    form = replace(form, each=-(-chunks // splits))
    splits = -(-chunks // form.each)
    x = jnp.pad(x, ((0, 0), (0, chunks * form.tiles * TILE - x.shape[1])))
    scales = [
        jnp.pad(array, ((0, 0), (0, 0), (0, chunks * form.scales - array.shape[2])))
        if weight.scaled and array is not None
        else array
        for array in (weight.scale, weight.offset)
    ]
    inputs = Inputs(x, weight.values, groups.group, groups.start, groups.length, *scales)
    by_tile = OUTS * words * weight.values.dtype.itemsize + rows * TILE * x.dtype.itemsize
    stages = max(2, min(STAGES, SHARED // BLOCKS // by_tile))
    scratch = Scratch(
        w=tiled((stages, OUTS, words), weight.values.dtype, 64), x=tiled((stages, rows, TILE), x.dtype, 32)
    )
    if has_tma(traced_for()):
        scratch = scratch._replace(landed=plgpu.Barrier(num_arrivals=2, num_barriers=stages))
    y: jax.Array = plgpu.kernel(
        body(_run, Outputs, form),
        out_type=jax.ShapeDtypeStruct((splits, -(-len(x) // GRID) * GRID, outs), dtype),
        scratch_types=[scratch],
        # blocks of a group run together, while its matrix is in the L2 cache
        grid=(len(groups.group) * form.parts, outs // OUTS, splits),
        grid_names=("block", "part", "split"),
        kernel_name="product",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(inputs)
    return y


def _run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, rows = refs.inputs, refs.scratch.x.shape[1]
    at, parts = lax.axis_index("block"), form.parts
    index, before = lax.div(at, parts), lax.rem(at, parts) * (rows // GRID)
    length = inputs.length[index] - before
    pl.when(length > 0)(
        partial(_multiply, refs, form, inputs.group[index], inputs.start[index] + before, length)
    )


def _multiply(refs: Refs[Inputs, Outputs, Scratch], form: Form, group: Any, start: Any, length: Any) -> None:
    """Multiplies rows from `start`, of which there are `length`, both in units of GRID."""
    inputs, out, smem = refs.inputs, refs.outputs.out, refs.scratch
    part, split = lax.axis_index("part"), lax.axis_index("split")
    stages, block, _ = smem.x.shape
    dtype, tma = smem.x.dtype, smem.landed is not None
    outs, rows = pl.ds(part * OUTS, OUTS), pl.ds(start * GRID, block)
    words, stored = smem.w.shape[2], inputs.w.shape[2] // smem.w.shape[2]
    first = split * form.each
    chunks = jnp.minimum(form.each, inputs.x.shape[1] // (form.tiles * TILE) - first)
    tiles = chunks * form.tiles

    def fetch(i: Any) -> None:
        slot, tile = lax.rem(i, stages), first * form.tiles + i
        landed = smem.landed.at[slot] if tma else None
        # inputs beyond the last stored tile are zeros
        at = pl.ds(jnp.minimum(tile, stored - 1) * words, words)
        copy(inputs.w.at[group, outs, at], smem.w.at[slot], landed)
        copy(inputs.x.at[rows, pl.ds(tile * TILE, TILE)], smem.x.at[slot], landed)

    def wait(i: Any) -> None:
        if tma:
            plgpu.barrier_wait(smem.landed.at[lax.rem(i, stages)])
            return
        ahead = i + stages - 1 < tiles  # whether as many tiles are in flight as fit
        pl.when(ahead)(lambda: plgpu.wait_gmem_to_smem(2 * (stages - 2)))
        pl.when(~ahead)(lambda: plgpu.wait_gmem_to_smem(0))

    def scales(chunk: Any) -> list[Any]:
        """Scales and offsets of a chunk, [OUTS, scales] each."""
        if not form.scaled:
            return []
        at = pl.ds((first + jnp.minimum(chunk, chunks - 1)) * form.scales, form.scales)
        return [
            load(ref.at[group, outs, at], layout=layout_of_scales(form.scales))
            for ref in (inputs.scale, inputs.offset)
            if ref is not None
        ]

    def zeros() -> Any:
        return plgpu.layout_cast(jnp.zeros((OUTS, block), jnp.float32), SUMS)

    def spread(line: Any, axis: int) -> Any:
        return plgpu.layout_cast(lax.broadcast_in_dim(line, (OUTS, block), [axis]), SUMS)

    def right(slot: Any, step: int) -> Any:
        taken = smem.x.at[slot, :, pl.ds(step * DEPTH, DEPTH)]
        return right_side(load(taken, layout=INPUTS), eight_bits=form.kind in ("int8", FP8))

    def fold_tile(i: Any, place: int, now: list[Any], total: Any) -> Any:
        """Adds the products of tile i, which is at a place in its chunk with scales and offsets `now`."""
        slot, in_tile = lax.rem(i, stages), TILE // (form.scaled or TILE)
        wait(i)
        pl.when(i + stages - 1 < tiles)(partial(fetch, i + stages - 1))
        numbers = load(smem.w.at[slot], layout=PACKED if form.kind in KINDS else NUMBERS)
        if form.kind in KINDS:
            some = slice(place * in_tile, (place + 1) * in_tile)
            for step, left in enumerate(_scaled_operands(numbers, now, some, form.kind, dtype)):
                total = plgpu.mma(total, left, right(slot, step))
            return total
        y = zeros() if form.scaled else total
        for step in range(TILE // DEPTH):
            y = plgpu.mma(y, left_side(numbers, step, form.kind, dtype), right(slot, step))
        return total + y * spread(columns_of(now[0], SUMS.reduce(1))[place], 0) if form.scaled else y

    def fold(chunk: Any, carry: Any) -> Any:
        total, now = carry
        following = scales(chunk + 1)
        for place in range(form.tiles):
            total = fold_tile(chunk * form.tiles + place, place, now, total)
        return total, following

    for i in range(stages - 1):
        pl.when(i < tiles)(partial(fetch, jnp.int32(i)))
    total, _ = lax.fori_loop(0, chunks, fold, (zeros(), scales(jnp.int32(0))))
    if form.kind in KINDS:
        total *= SCALED[str(dtype)]
    elif inputs.scale is not None and not form.scaled:
        total *= spread(load(inputs.scale.at[group, outs], layout=SUMS.reduce(1)), 0)
    for at, of_rows in enumerate(_by_grid(total.astype(out.dtype))):
        place = pl.ds((start + at) * GRID, GRID)
        pl.when(at < length)(partial(store, out.at[split, place, outs].T, of_rows))


def _by_grid(sums: jax.Array) -> list[jax.Array]:
    """Splits the sums [OUTS, rows] into arrays of GRID rows that can be stored transposed."""

    def split(_: Any, sums: Any) -> Any:
        layout = APART.to_mgpu()
        shape = layout.registers_shape((OUTS, GRID))
        columns = np.moveaxis(sums.registers, 1, 0)
        apart = [np.array([*map(elements, column.flat)], object) for column in columns]
        return [fragment(registers.reshape(shape), layout) for registers in apart]

    returned = [plgpu.ShapeDtypeStruct((OUTS, GRID), sums.dtype, layout=APART)] * (sums.shape[1] // GRID)
    arrays: list[jax.Array] = plgpu.inline_mgpu(arg_types=(SUMS,), return_type=returned)(split)(sums)
    return arrays


def _scaled_operands(
    weights: jax.Array, scales: Sequence[jax.Array], groups: slice, kind: str, dtype: Any
) -> list[jax.Array]:
    """The operands of a tile of four-bit weights, [OUTS, DEPTH] each, in units of SCALED.

    Args:
        scales: scales and perhaps offsets, float32 [OUTS, n].
        groups: the tile's among these.
    """

    def convert(_: Any, numbers: Any, *scales: Any) -> list[Any]:
        operands = [left_registers(OUTS, dtype) for _ in range(TILE // DEPTH)]
        for half, of_row in enumerate(zip(*(array.registers.flat for array in scales), strict=True)):
            scaled = ScaledNumbers(kind, dtype, [elements(register)[groups] for register in of_row])
            for step, (registers, _) in enumerate(operands):
                words = words_of(numbers.registers[0, step % 2, 0, 0, half].item())
                for number, word in enumerate(words):
                    pair = scaled.pair(word, step // 2, step / len(operands))
                    registers[0, 0, 0, number, half] = pair_of(pair, dtype)
        return [fragment(*operand) for operand in operands]

    layouts = PACKED, *(layout_of_scales(array.shape[1]) for array in scales)
    returned = plgpu.ShapeDtypeStruct((OUTS, DEPTH), dtype, layout=plgpu.Layout.MMA_LHS(dtype))
    converted = plgpu.inline_mgpu(arg_types=layouts, return_type=[returned] * (TILE // DEPTH))(convert)
    operands: list[jax.Array] = converted(weights, *scales)
    return operands
