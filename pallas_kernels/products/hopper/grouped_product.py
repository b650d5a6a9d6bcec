"""Products of each row with the matrix of its group, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

`groups` gives the order of rows; matrices are [groups, out, in], as stored. A thread block computes a block
of rows of one group and 64 outputs per compute warpgroup. Outputs are the 64-row operand of the tensor cores,
so a group with few rows wastes little. That operand may be in registers, so eight-bit weights are converted
there, unless x has eight bits too. Groups without rows are not read. Several thread blocks can share the
inputs of a product with few outputs.

A warpgroup waits for a stage of weights, converts it and waits for the tensor cores, and needs longer for it
than the multiprocessor may take. So if a block has few rows and a single warpgroup for its outputs, another
takes every other stage, and the first adds its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from jaxlib.mlir.dialects import arith

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, in_one_warp, store_transposed, tiled
from pallas_kernels.mosaic.versions import store
from pallas_kernels.mosaic.words import asm
from pallas_kernels.products.groups import BLOCK, GRID, Groups, input_splits, out_per_block
from pallas_kernels.quantization.quantized import GROUP

WIDE = 128  # columns of a stage, if both sides have eight bits, or weights have and there are few rows
WIDEST = 256  # if two warpgroups share the inputs of one sum: copies then cost half
# rows of a block of one compute warpgroup; with two, a quarter: with more, registers do not suffice for two
# blocks per multiprocessor
FEW = 64
# rows of a block whose inputs two warpgroups share, by bytes of a number of x; with more, registers do not
# suffice for two blocks per multiprocessor
SHARED_ROWS = {1: 32, 2: 16}
IN_FLIGHT = 1 << 16  # bytes of weights, if this leaves shared memory for two blocks per multiprocessor
SHARED = 110 << 10  # bytes of shared memory of such a block
STAGES = 4  # otherwise
ALIGNED = 32  # numbers of float32: TMA writes to multiples of 128 bytes
LEAST_STEPS = 8  # minimum stages that a block reads if several share the inputs
LEAST_ROWS = BLOCK[0]  # of a block
BITS_OF_128 = 0x43004300  # of a pair in bfloat16; its seven mantissa bits count ones


class Stages(NamedTuple):
    """What a thread block multiplies, and the barriers of its stages.

    Attributes:
        w, x: weights [slots, outs, columns], and rows [slots, block, columns].
        scales: those of the outputs for the inputs of a stage, given its number.
        scaled: sums over these inputs, [outs, rows], times all scales; takes also the slot, `scales` and the
            first row.
    """

    steps: int
    w: Any
    x: Any
    full: Any
    free: Any
    scales: Callable[[jax.Array], jax.Array | None]
    scaled: Callable[[jax.Array, jax.Array, jax.Array | None, int], jax.Array]


def grouped_product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    groups: Groups,
    *,
    block: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    x_scale: jax.Array | None = None,
    splits: int = 1,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: bfloat16, float16, int8 or float8_e4m3fn [places, in], in the order of `groups`. With a single
            group, places may end within the last block.
        weight: [groups, out, in] in x's dtype or, unless x has eight bits, int8 or float8_e4m3fn; out and in
            are multiples of 64.
        scale: float32 [groups, out], which multiplies results; or [groups, out, in / 128], which multiplies
            the sums over 128 inputs.
        groups: from `groups.grouped`.
        block: rows per thread block, from `groups.one_group`; None chooses for several groups.
        dtype: dtype of the result; None: x's.
        x_scale: float32 [places, rounded up to whole blocks], which multiplies results; or
            [in / 128, the same], which multiplies the sums over 128 inputs.
        splits: thread blocks that share the inputs, from `splits_of`. XLA adds their sums in float32.
        operand_in_registers: the tensor cores read eight-bit weights, converted, from registers. False goes
            through shared memory, which is slower but the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`.

    Returns:
        [places, out]; undefined in places without a row.
    """
    out, block, result = weight.shape[1], block or groups.block, jnp.dtype(dtype or x.dtype)
    dtype = result if splits == 1 else jnp.dtype(jnp.float32)
    warpgroups = out_per_block(len(groups.group), out) // ROWS
    eight = weight.dtype.itemsize == 1
    columns = _columns(x.dtype, x.shape[1] // splits, block * warpgroups**2) if eight else COLUMNS
    at_once = columns if weight.dtype == x.dtype else COLUMNS
    turns = 2 if eight and warpgroups == 1 and block <= SHARED_ROWS[x.dtype.itemsize] else 1
    in_one_sum = weight.dtype != x.dtype and (scale is None or scale.ndim == 2)
    if turns == 2 and in_one_sum and x.shape[1] // splits % WIDEST == 0:
        columns = WIDEST
    # bytes of a stage, and of sums and results
    read, more = warpgroups * ROWS * columns * weight.dtype.itemsize, block * columns * x.dtype.itemsize
    x_scales = max(block, ALIGNED) if x_scale is not None and x_scale.ndim == 2 else 0  # of a stage
    more += 4 * x_scales
    fixed = warpgroups * block * ROWS * (dtype.itemsize + 4 * (turns - 1))
    stages = IN_FLIGHT // read
    if stages * (read + more) + fixed > SHARED:
        fitting = (SHARED - fixed) // (read + more) // turns * turns
        stages = fitting if columns >= WIDE and x.dtype.itemsize > 1 else STAGES
    through = (
        None
        if operand_in_registers or weight.dtype == x.dtype
        else tiled((turns * warpgroups, ROWS, columns), x.dtype)
    )
    scratch = {
        "x_smem": tiled((stages, block, columns), x.dtype, at_once),
        "w_smem": tiled((stages, warpgroups * ROWS, columns), weight.dtype, at_once),
        "a_smem": through,
        "scale_smem": plgpu.SMEM((stages, x_scales), jnp.float32) if x_scales else None,
        "sum_smem": plgpu.SMEM((ROWS, block), jnp.float32) if turns > 1 else None,
        "out_smem": plgpu.SMEM((warpgroups, block, ROWS), dtype),
        "full": plgpu.Barrier(num_arrivals=3 if x_scales else 2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        "summed": plgpu.Barrier() if turns > 1 else None,
    }
    arrays = x, weight, groups.group, groups.start, groups.length, scale, x_scale
    return launch(kernel, arrays, scratch, turns * warpgroups, splits, result, interpret=interpret)


def launch(
    kernel: Callable[..., None],
    arrays: Sequence[Any],
    scratch: Mapping[str, Any],
    threads: int,
    splits: int,
    result: jnp.dtype[Any],
    **options: Any,
) -> jax.Array:
    """Runs a kernel with this scratch memory and so many warpgroups that multiply -> [places, out]."""
    x, weight, group = arrays[:3]
    warpgroups, _, rows = scratch["out_smem"].shape
    y: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((splits, len(x), weight.shape[1]), scratch["out_smem"].dtype),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        # a group's blocks run together, while its matrix is in the L2 cache
        grid=(len(group), weight.shape[1] // (warpgroups * rows), splits),
        grid_names=("block", "part", "split"),
        num_threads=threads + 1,
        thread_name="warpgroup",
        kernel_name="grouped_product",
        **options,
    )(*arrays)
    return y[0] if splits == 1 else y.sum(0).astype(result)


def splits_of(rows: int, weight: jax.Array, x: jax.typing.DTypeLike, cores: int) -> int:
    """Thread blocks that share the inputs of a product with one group, in equal parts; see `input_splits`.

    Args:
        weight: [out, in], of eight bits.
        x: dtype of the rows.
    """
    out, size = weight.shape
    blocks, columns = -(-rows // BLOCK[1]), _columns(jnp.dtype(x), size, rows)
    blocks *= out // out_per_block(blocks, out)
    limit = input_splits(blocks, rows, size, 8, columns * LEAST_STEPS, cores)
    return next(splits for splits in range(limit, 0, -1) if size // columns % splits == 0)


def _columns(x: jnp.dtype[Any], size: int, rows: int) -> int:
    """Columns of a stage of eight-bit weights, for blocks of at most this many rows."""
    return WIDE if (x.itemsize == 1 or rows <= FEW) and size % WIDE == 0 else COLUMNS


def kernel(
    x_ref: Any, w_ref: Any, group_ref: Any, start_ref: Any, length_ref: Any, scale_ref: Any, x_scale_ref: Any,
    out_ref: Any, *,
    x_smem: Any, w_smem: Any, a_smem: Any = None, scale_smem: Any = None, sum_smem: Any = None, out_smem: Any,
    full: Any, free: Any, summed: Any = None,
    tensor: Any = None, total_of: Callable[[Stages, Any], jax.Array] | None = None,
    layout: Any = plgpu.Layout.WGMMA, keep: Callable[[Any, jax.Array], None] = store_transposed,
) -> None:  # fmt: skip
    stages, block, columns = x_smem.shape
    (warpgroups, _, outs), steps = out_smem.shape, x_ref.shape[1] // columns // out_ref.shape[0]
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    # two warpgroups take turns if there are sums to add
    turns, turn = (1, jnp.int32(0)) if sum_smem is None else (2, warpgroup)
    group, start, length = group_ref[index], start_ref[index], length_ref[index]
    first, begin = part * warpgroups * outs, split * steps  # this block's first output and step
    at_output = (warpgroup - turn) * outs
    # outputs of the block, and of all
    inside, mine = pl.ds(at_output, outs), pl.ds(first + at_output, outs)
    by_inputs = scale_ref is not None and len(scale_ref.shape) == 3
    rows = pl.ds(start * GRID, block)

    def scale_of(ref: Any, reduced: int) -> jax.Array:
        """Loads a scale for each output or, if reduced is 0, for each row."""
        loaded: jax.Array = plgpu.load(ref, layout=layout.reduce(reduced), optimized=False)
        return loaded

    def scales(i: jax.Array) -> jax.Array | None:
        at = (begin + i) * columns // GROUP
        return scale_of(scale_ref.at[group, mine, at], 1) if by_inputs else None

    def scaled(y: jax.Array, slot: jax.Array, line: jax.Array | None, row: int = 0) -> jax.Array:
        if line is not None:
            y *= lax.broadcast_in_dim(line, y.shape, [0])
        if scale_smem is not None:
            some = scale_smem.at[slot, pl.ds(row, y.shape[1])]
            y *= lax.broadcast_in_dim(scale_of(some, 0), y.shape, [1])
        return y

    def multiply(slot: Any, acc: Any) -> None:
        """Adds the step in a slot, without waiting for the sum."""
        plgpu.barrier_wait(full.at[slot])
        weights, x = w_smem.at[slot, inside], x_smem.at[slot]
        if w_smem.dtype == x_smem.dtype:
            plgpu.wgmma(acc, weights, x.transpose((1, 0)))
            return
        for at in range(0, columns, COLUMNS):  # the next are converted while the tensor cores work
            if at and at % WIDE == 0:
                plgpu.wgmma_wait(0)  # with more weights in registers, fewer blocks fit
            some = pl.ds(at, COLUMNS)
            operand: Any = _operand_of(weights.at[:, some], x_smem.dtype, in_registers=a_smem is None)
            if a_smem is not None:
                place = a_smem.at[warpgroup, :, some]
                place[...] = operand
                plgpu.commit_smem()
                operand = place
            plgpu.wgmma(acc, operand, x.at[:, some].transpose((1, 0)))

    turn_steps = lax.div(steps - turn + turns - 1, turns)

    def in_one_sum(acc: Any) -> jax.Array:
        def add(slot: Any) -> None:
            multiply(slot, acc)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])

        if block >= FEW:  # constant slots take fewer instructions, but more registers

            @pl.loop(0, steps // stages)
            def _(_: jax.Array) -> None:
                for slot in range(stages):
                    add(slot)

            for slot in range(steps % stages):
                add(slot)
        else:
            pl.loop(0, turn_steps)(lambda number: add(lax.rem(number * turns + turn, stages)))
        result: jax.Array = acc[...]
        return result

    def in_short_sums(accumulator: Any) -> jax.Array:
        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            i = number * turns + turn
            slot = lax.rem(i, stages)

            def one(acc: Any) -> jax.Array:
                multiply(slot, acc)
                result: jax.Array = acc[...]
                return result

            line = scales(i)
            y = pl.run_scoped(one, accumulator)
            y = scaled(y, slot, line)
            plgpu.barrier_arrive(free.at[slot])
            total += y
            return total

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), plgpu.Layout.WGMMA)
        total: jax.Array = lax.fori_loop(0, turn_steps, add, zeros)
        return total

    def compute() -> None:
        if total_of is not None:
            stages_of_block = Stages(steps, w_smem, x_smem, full, free, scales, scaled)
            return finish(total_of(stages_of_block, tensor))
        accumulator = plgpu.WGMMAAccumulatorRef(
            (ROWS, block), jnp.int32 if x_smem.dtype == jnp.int8 else jnp.float32
        )
        # Hopper adds products of eight-bit floats with few bits, so these sums stay short.
        short = by_inputs or x_smem.dtype == jnp.float8_e4m3fn
        y = (
            in_short_sums(accumulator)
            if short
            else pl.run_scoped(in_one_sum, accumulator).astype(jnp.float32)
        )
        if sum_smem is None:
            finish(y)
            return

        @pl.when(turn == 1)
        def _() -> None:
            store(sum_smem, y)
            plgpu.barrier_arrive(summed)

        @pl.when(turn == 0)
        def _() -> None:
            plgpu.barrier_wait(summed)
            finish(y + plgpu.load(sum_smem, layout=plgpu.Layout.WGMMA))

    def finish(y: jax.Array) -> None:
        """Scales the outputs and copies them out."""
        if scale_ref is not None and not by_inputs:
            y *= lax.broadcast_in_dim(scale_of(scale_ref.at[group, mine], 1), y.shape, [0])
        if x_scale_ref is not None and scale_smem is None:
            y *= lax.broadcast_in_dim(scale_of(x_scale_ref.at[rows], 0), y.shape, [1])
        result = out_smem.at[warpgroup - turn]
        keep(result, y.astype(out_smem.dtype))
        plgpu.commit_smem()
        at: Any = 0
        size = block // GRID
        while size:  # the length of a copy must be static
            taken = length & size
            from_smem, to = (
                ref.at[pl.ds(place * GRID, size * GRID)]
                for ref, place in ((result, at), (out_ref.at[split], start + at))
            )
            pl.when(taken > 0)(partial(plgpu.copy_smem_to_gmem, from_smem, to.at[:, mine]))
            at, size = at + taken, size // 2
        plgpu.wait_smem_to_gmem(0)

    def memory() -> None:
        @pl.loop(0, steps)
        def _(i: jax.Array) -> None:
            slot, some = lax.rem(i, stages), pl.ds((begin + i) * columns, columns)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            plgpu.copy_gmem_to_smem(
                w_ref.at[group, pl.ds(first, warpgroups * outs), some], w_smem.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(x_ref.at[rows, some], x_smem.at[slot], full.at[slot])
            if scale_smem is not None:
                scales = x_scale_ref.at[(begin + i) * columns // GROUP, rows]
                plgpu.copy_gmem_to_smem(scales, scale_smem.at[slot, pl.ds(0, block)], full.at[slot])

        # wait for each slot's last release: every barrier phase must be observed
        for slot in range(min(stages, steps)):
            plgpu.barrier_wait(free.at[slot])

    pl.when((length > 0) & (warpgroup < turns * warpgroups))(compute)
    pl.when((length > 0) & (warpgroup == turns * warpgroups))(partial(in_one_warp, memory))


def _operand_of(x: Any, dtype: jnp.dtype[Any], *, in_registers: bool) -> jax.Array:
    """Loads eight-bit numbers [64, n] and converts them exactly to dtype, 16-bit floats.

    A thread loads the pairs of adjacent numbers that an operand of the tensor cores needs from it. Loads of
    four numbers would be half as many, but threads would have to exchange two of them.

    Args:
        in_registers: as an operand of the tensor cores. False: use only operations that Pallas interprets.
    """
    loaded: jax.Array = plgpu.load(x, layout=plgpu.Layout.WGMMA)
    if in_registers and x.dtype == jnp.int8 and dtype == jnp.bfloat16:
        returned = plgpu.ShapeDtypeStruct(loaded.shape, dtype, layout=plgpu.Layout.WGMMA)
        widen = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=returned)(_widened)
        widened: jax.Array = widen(loaded)
        return widened
    if x.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float16)  # the hardware converts float8 to float16
    return loaded.astype(dtype)


def _widened(_: Any, x: Any) -> Any:
    """int8 [64, n] -> bfloat16.

    Of a number, seven bits are added to 128. The sign bit doubles the 128 that is then subtracted.
    """
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    code = """{
    .reg .b32 both, low, sign;
    prmt.b32 both, $1, 0, 0x4140;
    lop3.b32 low, both, 0x007f007f, $2, 0xea;
    lop3.b32 sign, both, 0x00800080, $2, 0xea;
    sub.bf16x2 $0, low, sign;
    }"""
    registers = np.empty_like(x.registers)
    for at, register in np.ndenumerate(x.registers):
        numbers = arith.extui(i32, mgpu.utils.bitcast(register, i16))
        registers[at] = mgpu.utils.bitcast(asm(code, numbers, mgpu.c(BITS_OF_128, i32)), pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
