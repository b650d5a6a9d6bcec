"""Products with four-bit weights, as a Pallas Mosaic GPU kernel for Hopper (sm_90a): each row by the matrix
of its group.

A dense product has a single group. A thread block computes a block of rows and 64 outputs per compute
warpgroup. Each warpgroup loads packed words and unpacks them in its registers as an operand of the tensor
cores. So weights are read once per block of rows and never stored unpacked. Weights are multiplied by their
scales first, so that one sum takes all inputs: scales and weights are rounded to x's dtype, as in a model
with such weights, but the weights of MXFP4 stay exact.

Words and inputs are copied tile by tile or, in blocks of few rows, in pairs of tiles, with their scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, in_one_warp, store_transposed, tiled
from pallas_kernels.mosaic.refs import Refs, body
from pallas_kernels.mosaic.words import words_of
from pallas_kernels.products.four_bit_numbers import PAIR, SCALED, ScaledNumbers
from pallas_kernels.products.groups import BLOCK, GRID, Groups, input_splits, one_group
from pallas_kernels.products.scales_in_registers import elements, layout_of_scales
from pallas_kernels.quantization.int4 import SCALES, TILE, WORDS, Int4

STAGES = 6  # maximum in flight
TWO_BLOCKS = 16  # with at most this many rows per block, a multiprocessor holds two blocks
# bytes of shared memory per block if a multiprocessor holds two, and if it holds one
SHARED = 110 << 10, 224 << 10
LEAST_TILES = 4  # minimum tiles per block if several blocks share a product's inputs
REGISTERS = 216, 72  # per compute thread and per memory thread, in blocks of 64 rows or more
STEP = 2 * WORDS  # columns in the same nibble of all words
WORD_LAYOUT = plgpu.Layout.TILED(  # int32 [64, 4 n], with a word in place of each pair of numbers in WGMMA
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
DEPTH = 16  # columns of a product of the tensor cores
UNIT = 16  # bytes, of addresses in descriptors


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


def int4_product(
    x: jax.Array, weight: Int4, *, dtype: jax.typing.DTypeLike | None = None, cores: int
) -> jax.Array:
    """x [rows, in] @ weight [out, in].T.

    Args:
        x: bfloat16 or float16, with the weight's transform applied.
        weight: in one part; out is a multiple of 64. Scales are at most 2^62 in magnitude, of e2m1 2^64, and
            with float16 below 16; larger ones give NaN. e2m1 has no offsets.
        dtype: dtype of the result; None: x's.
        cores: multiprocessors of the device. With few outputs, several thread blocks share the inputs, and
            XLA adds their partial sums.

    Returns:
        [rows, out].
    """
    rows = len(x)
    groups, block = one_group(rows)
    splits = splits_of(rows, weight.shape[0], weight.shape[1], cores)
    matrices, partial_dtype = weight[None], jnp.float32 if splits > 1 else dtype or x.dtype
    y = _products(jnp.pad(x, ((0, -rows % block), (0, 0))), matrices, groups, block, splits, partial_dtype)
    y = y[0] if splits == 1 else y.sum(0).astype(dtype or x.dtype)
    return y[:rows]


def splits_of(rows: int, outs: int, size: int, cores: int) -> int:
    """Thread blocks that share a product's inputs; see `input_splits`."""
    blocks = -(-rows // BLOCK[1]) * outs // (ROWS * _warpgroups(outs))
    return input_splits(blocks, rows, size, 4, TILE * LEAST_TILES, cores)


def grouped_int4_product(x: jax.Array, weight: Int4, groups: Groups) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: bfloat16 or float16 [places, in], in the order of `groups`, with the weight's transform applied.
        weight: [groups, out, in], otherwise as in `int4_product`.
        groups: from `groups.grouped`.

    Returns:
        [places, out], in x's dtype; undefined in places without a row.
    """
    return _products(x, weight, groups, groups.block, 1, x.dtype)[0]


def _products(
    x: jax.Array, weight: Int4, groups: Groups, block: int, splits: int, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The partial sums of each split of the inputs: [splits, places, out]."""
    _, out, size = weight.shape
    offsets, warpgroups = weight.offset is not None, _warpgroups(out)
    outs, inputs = warpgroups * ROWS, TILE * (2 if block <= COLUMNS else 1)  # of a stage
    scales = max(SCALES, inputs // weight.group)  # that come with a stage
    x = jnp.pad(x, ((0, 0), (0, -size % inputs)))
    count = x.shape[1] // inputs
    each = -(-count // splits)
    splits = -(-count // each)
    # bytes
    by_stage = outs * (inputs // 2 + 4 * scales * (1 + offsets)) + block * inputs * x.dtype.itemsize
    shared = SHARED[block > TWO_BLOCKS] - outs * block * jnp.dtype(dtype).itemsize
    stages = min(STAGES, shared // by_stage)
    line = plgpu.SMEM((stages, outs, scales), jnp.float32)
    scratch = Scratch(
        free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        full=plgpu.Barrier(num_arrivals=3 + offsets, num_barriers=stages),
        offset=line if offsets else None,
        out=plgpu.SMEM((warpgroups, block, ROWS), jnp.dtype(dtype)),
        scale=line,
        w=tiled((stages, outs, inputs // TILE * WORDS), jnp.dtype("int32"), WORDS),
        x=tiled((stages, block, inputs), x.dtype, COLUMNS),
    )
    y: jax.Array = plgpu.kernel(
        body(_run, Outputs, Form(each, weight.group, weight.kind)),
        out_type=jax.ShapeDtypeStruct((splits, -(-len(x) // GRID) * GRID, out), dtype),
        scratch_types=[scratch],
        # blocks of a group run together, while its matrix is in the L2 cache
        grid=(len(groups.group), out // outs, splits),
        grid_names=("block", "part", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="int4_product",
    )(Inputs(x, weight.values, weight.scale, groups.group, groups.start, groups.length, weight.offset))
    return y


def _warpgroups(out: int) -> int:
    """Compute warpgroups of a thread block."""
    return 2 if out % (2 * ROWS) == 0 else 1


def _run(refs: Refs[Inputs, Outputs, Scratch], form: Form) -> None:
    inputs, scratch = refs.inputs, refs.scratch
    (stages, block, columns), warpgroups = scratch.x.shape, scratch.out.shape[0]
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    group, start, length = inputs.group[index], inputs.start[index], inputs.length[index]
    # the block's first output, its first stage of inputs, and the number of stages
    first_out, first = part * warpgroups * ROWS, split * form.each
    count = jnp.minimum(form.each, inputs.x.shape[1] // columns - first)
    mine = pl.ds(warpgroup * ROWS, ROWS)
    tiles, in_tile = columns // TILE, TILE // form.group  # of a stage; groups of inputs in a tile
    scales, scales_copied = tiles * in_tile, scratch.scale.shape[2]  # of a stage; that come with it
    limited = block >= COLUMNS and warpgroups == 2  # registers

    def fold(slot: int, number: jax.Array, total: jax.Array) -> jax.Array:
        """Adds the products of a stage."""
        # of the scales that come with the stage, some may be others'
        at: Any = 0 if scales == scales_copied else lax.rem((first + number) * scales, scales_copied)
        plgpu.barrier_wait(scratch.full.at[slot])
        for tile in range(tiles):
            some = pl.ds(at + tile * in_tile, in_tile)
            of_groups = [
                plgpu.load(ref.at[slot, mine, some], layout=layout_of_scales(in_tile), optimized=False)
                for ref in (scratch.scale, scratch.offset)
                if ref is not None
            ]
            w = scratch.w.at[slot, mine, pl.ds(tile * WORDS, WORDS)]
            words = plgpu.load(w, layout=WORD_LAYOUT)
            # waits for each tile: with more weights in registers, fewer blocks fit
            total = _add_scaled(total, words, of_groups, scratch.x.at[slot], tile, form.kind)
        plgpu.barrier_arrive(scratch.free.at[slot])
        return total

    def turn(turn: jax.Array, total: jax.Array) -> jax.Array:
        for slot in range(stages):  # constant: addresses and phases take fewer instructions
            number = turn * stages + slot
            total = lax.cond(number < count, partial(fold, slot, number), lambda total: total, total)
        return total

    def compute() -> None:
        if limited:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), plgpu.Layout.WGMMA)
        y = lax.fori_loop(0, lax.div(count + stages - 1, stages), turn, zeros) * SCALED[str(scratch.x.dtype)]
        staged = scratch.out.at[warpgroup]
        store_transposed(staged, y.astype(scratch.out.dtype))
        plgpu.commit_smem()
        outputs = pl.ds(first_out + warpgroup * ROWS, ROWS)
        at: Any = 0
        size = block // GRID
        while size:  # the length of a copy must be static
            taken, some = length & size, pl.ds(at * GRID, size * GRID)
            to = refs.outputs.out.at[split, pl.ds((start + at) * GRID, size * GRID), outputs]
            pl.when(taken > 0)(partial(plgpu.copy_smem_to_gmem, staged.at[some], to))
            at, size = at + taken, size // 2
        plgpu.wait_smem_to_gmem(0)

    def copy_stages() -> None:
        outs, rows = pl.ds(first_out, warpgroups * ROWS), pl.ds(start * GRID, block)

        def copy(slot: int, i: jax.Array) -> None:
            number = first + i
            of_scales = lax.div(number * tiles * in_tile, scales_copied)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, scratch.free.at[slot]))
            # beyond the last tile, copies are zeros
            copies = [
                (inputs.w.at[group, outs], scratch.w, number),
                (inputs.x.at[rows], scratch.x, number),
                (inputs.scale.at[group, outs], scratch.scale, of_scales),
            ]
            if inputs.offset is not None:
                copies.append((inputs.offset.at[group, outs], scratch.offset, of_scales))
            for source, target, piece in copies:
                some = pl.ds(piece * target.shape[2], target.shape[2])
                plgpu.copy_gmem_to_smem(source.at[:, some], target.at[slot], scratch.full.at[slot])

        @pl.loop(0, lax.div(count + stages - 1, stages))
        def _(turn: jax.Array) -> None:
            for slot in range(stages):
                i = turn * stages + slot
                pl.when(i < count)(partial(copy, slot, i))

        # Wait for each slot's last release: every barrier phase must be observed.
        pl.loop(0, jnp.minimum(count, stages))(lambda slot: plgpu.barrier_wait(scratch.free.at[slot]))

    def memory() -> None:
        """Copies stages, as far ahead of the compute warpgroups as shared memory allows."""
        if limited:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        in_one_warp(copy_stages)

    pl.when((length > 0) & (warpgroup < warpgroups))(compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(memory)


def _add_scaled(
    total: jax.Array, words: jax.Array, scales: Sequence[jax.Array], x: Any, tile: int, kind: str
) -> jax.Array:
    """Adds a product with words int32 [64, 16], whose numbers are multiplied by their scales first. They are
    unpacked without exchanging data between lanes.

    A thread loads words j, j + 4, j + 8 and j + 12 of a row's tile. Bits 4 k to 4 k + 3 of both halves of
    these words are the pairs of adjacent numbers that the tensor cores expect from this thread in columns
    32 k to 32 k + 31.

    Args:
        total: float32 [64, rows], in units of SCALED.
        scales: scales and perhaps offsets, float32 [64, groups of a tile] each.
        x: bfloat16 or float16 [rows, TILE * n], in shared memory in tiles of 8 by COLUMNS.
        tile: of x.
        kind: of the numbers.

    Returns:
        total plus the product, when the tensor cores are done.
    """
    dtype = x.dtype

    def add(_: Any, total: Any, words: Any, x: Any, *scales: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        sums = [word for register in total.registers.flat for word in words_of(register)]
        count = len(sums)
        names = ", ".join(f"${n}" for n in range(count))
        of = PAIR[str(dtype)].removesuffix("x2")
        shape = f"m64n{2 * count}k{DEPTH}.f32.{of}.{of}"
        first, part = _descriptor(x)
        code = ["wgmma.fence.sync.aligned;"]
        for step in range(TILE // DEPTH):
            left = ", ".join(f"${2 * count + 1 + 4 * step + n}" for n in range(4))
            columns = tile * TILE + step * DEPTH
            place = columns // COLUMNS * part + columns % COLUMNS * 2 // UNIT
            code.append(f"add.s64 x, ${2 * count}, {place};")
            code.append(f"wgmma.mma_async.sync.aligned.{shape} {{{names}}}, {{{left}}}, x, 1, 1, 1, 0;")
        code += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * count),
            [*sums, first, *_scaled(words, scales, kind, dtype)],
            "{\n.reg .b64 x;\n" + "\n".join(code) + "\n}",
            ",".join(["=r"] * count + [*map(str, range(count)), "l"] + ["r"] * (TILE // 4) + ["~{memory}"]),
            has_side_effects=True,
        )
        number = ir.VectorType.get((1,), ir.F32Type.get())
        added = [mgpu.utils.bitcast(llvm.extractvalue(i32, struct, [n]), number) for n in range(count)]
        registers = np.empty_like(total.registers)
        for n, at in enumerate(np.ndindex(registers.shape)):
            registers[at] = mgpu.utils.vector_concat(added[2 * n : 2 * n + 2])
        return mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)

    smem = plgpu.RefType(tiled(x.shape, x.dtype).transforms)
    types = plgpu.Layout.WGMMA, WORD_LAYOUT, smem, *(layout_of_scales(scale.shape[1]) for scale in scales)
    returned = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA)
    run = plgpu.inline_mgpu(arg_types=types, return_type=returned)(add)
    result: jax.Array = run(total, words, x, *scales)
    return result


def _descriptor(x: Any) -> tuple[Any, int]:
    """The descriptor of the first columns of x for the tensor cores, and what it grows by for the next
    COLUMNS. One addition gives another product's; Pallas computes each tile's from its address, in 64 bits.
    """
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    rows, part = (2 * stride // UNIT for stride in ir.MemRefType(x.type).get_strides_and_offset()[0][:2])
    address = arith.trunci(i32, llvm.ptrtoint(i64, mgpu.utils.memref_ptr(x)))
    place = arith.extui(i64, arith.shrui(address, mgpu.c(UNIT.bit_length() - 1, i32)))
    swizzled = 1 << 62  # in rows of 128 bytes
    return arith.ori(place, mgpu.c(swizzled | rows << 32, i64)), part


def _scaled(words: Any, scales: Sequence[Any], kind: str, dtype: jnp.dtype[Any]) -> list[Any]:
    """Pairs of scaled numbers, in units of SCALED, in the order of products and of their registers."""
    i32, (_, count, *_) = ir.IntegerType.get_signless(32), words.registers.shape
    nibbles = TILE // STEP
    pairs = np.empty((nibbles, count, 2), object)
    for half, of_row in enumerate(zip(*(array.registers.flat for array in scales), strict=True)):
        scaled = ScaledNumbers(kind, dtype, [elements(register) for register in of_row])
        for word in range(count):
            register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
            for nibble in range(nibbles):
                pairs[nibble, word, half] = scaled.pair(register, nibble, nibble / nibbles)
    return list(pairs.flat)
