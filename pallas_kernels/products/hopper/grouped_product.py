"""Products of each row with the matrix of its group, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

`groups` gives the order of rows; matrices are [groups, out, in], as stored. A thread block computes a block
of rows of one group and 64 outputs per compute warpgroup. Outputs are the 64-row operand of the tensor cores,
so a group with few rows wastes little. That operand may be in registers, so eight-bit weights are converted
there, unless x has eight bits too. Groups without rows are not read. Several thread blocks can share the
inputs of a product with few outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, store_transposed, tiled
from pallas_kernels.products.groups import BLOCK, GRID, Groups, input_splits, out_per_block
from pallas_kernels.quantization.quantized import GROUP

WIDE = 128  # columns of a stage, if x has eight bits
IN_FLIGHT = 1 << 16  # bytes of weights, if this leaves shared memory for two blocks per multiprocessor
SHARED = 110 << 10  # bytes of shared memory of such a block
STAGES = 4  # otherwise
LEAST_STEPS = 8  # minimum stages that a block reads if several share the inputs


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
        x_scale: float32 [places, rounded up to whole blocks], which multiplies results.
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
    columns = _columns(x.dtype, x.shape[1])
    # bytes of a stage
    read, more = warpgroups * ROWS * columns * weight.dtype.itemsize, block * columns * x.dtype.itemsize
    deep = IN_FLIGHT // read
    stages = deep if deep * (read + more) + warpgroups * block * ROWS * dtype.itemsize <= SHARED else STAGES
    through = (
        None
        if operand_in_registers or weight.dtype == x.dtype
        else tiled((warpgroups, ROWS, COLUMNS), x.dtype)
    )
    scratch = {
        "x_smem": tiled((stages, block, columns), x.dtype, columns),
        "w_smem": tiled((stages, warpgroups * ROWS, columns), weight.dtype, columns),
        "a_smem": through,
        "out_smem": plgpu.SMEM((warpgroups, block, ROWS), dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
    }
    y: jax.Array = plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((splits, len(x), out), dtype),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        # a group's blocks run together, while its matrix is in the L2 cache
        grid=(len(groups.group), out // (warpgroups * ROWS), splits),
        grid_names=("block", "part", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="grouped_product",
        interpret=interpret,
    )(x, weight, groups.group, groups.start, groups.length, scale, x_scale)
    return y[0] if splits == 1 else y.sum(0).astype(result)


def splits_of(rows: int, weight: jax.Array, x: jax.typing.DTypeLike, cores: int) -> int:
    """Thread blocks that share the inputs of a product with one group, in equal parts; see `input_splits`.

    Args:
        weight: [out, in], of eight bits.
        x: dtype of the rows.
    """
    out, size = weight.shape
    blocks, columns = -(-rows // BLOCK[1]), _columns(jnp.dtype(x), size)
    blocks *= out // out_per_block(blocks, out)
    most = input_splits(blocks, rows, size, 8, columns * LEAST_STEPS, cores)
    return next(splits for splits in range(most, 0, -1) if size // columns % splits == 0)


def _columns(x: jnp.dtype[Any], size: int) -> int:
    """Columns of a stage."""
    return WIDE if x.itemsize == 1 and size % WIDE == 0 else COLUMNS


def _kernel(
    x_ref: Any, w_ref: Any, group_ref: Any, start_ref: Any, length_ref: Any, scale_ref: Any, x_scale_ref: Any,
    out_ref: Any, *,
    x_smem: Any, w_smem: Any, a_smem: Any = None, out_smem: Any, full: Any, free: Any,
) -> None:  # fmt: skip
    stages, block, columns = x_smem.shape
    warpgroups, steps = out_smem.shape[0], x_ref.shape[1] // columns // out_ref.shape[0]
    index, part, split, warpgroup = (lax.axis_index(name) for name in ("block", "part", "split", "warpgroup"))
    group, start, length = group_ref[index], start_ref[index], length_ref[index]
    first, begin = part * warpgroups * ROWS, split * steps  # this block's first output and step
    # outputs of the block, and of all
    own, mine = pl.ds(warpgroup * ROWS, ROWS), pl.ds(first + warpgroup * ROWS, ROWS)
    by_inputs = scale_ref is not None and len(scale_ref.shape) == 3

    def multiply(i: jax.Array, acc: Any) -> None:
        """Adds step i, without waiting for the sum."""
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(full.at[slot])
        weights = w_smem.at[slot, own]
        if w_smem.dtype != x_smem.dtype:
            weights = _converted(weights, x_smem.dtype)
            if a_smem is not None:
                a_smem[warpgroup] = weights
                plgpu.commit_smem()
                weights = a_smem.at[warpgroup]
        plgpu.wgmma(acc, weights, x_smem.at[slot].transpose((1, 0)))

    def in_one_sum(acc: Any) -> jax.Array:
        @pl.loop(0, steps)
        def _(i: jax.Array) -> None:
            multiply(i, acc)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(i, stages)])

        result: jax.Array = acc[...]
        return result

    def in_short_sums(accumulator: Any) -> jax.Array:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            def one(acc: Any) -> jax.Array:
                multiply(i, acc)
                result: jax.Array = acc[...]
                return result

            line = (
                scale_of(scale_ref.at[group, mine, (begin + i) * columns // GROUP], 1) if by_inputs else None
            )
            y = pl.run_scoped(one, accumulator)
            if line is not None:
                y *= lax.broadcast_in_dim(line, y.shape, [0])
            plgpu.barrier_arrive(free.at[lax.rem(i, stages)])
            total += y
            return total

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), plgpu.Layout.WGMMA)
        total: jax.Array = lax.fori_loop(0, steps, add, zeros)
        return total

    def compute() -> None:
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
        if scale_ref is not None and not by_inputs:
            y *= lax.broadcast_in_dim(scale_of(scale_ref.at[group, mine], 1), y.shape, [0])
        if x_scale_ref is not None:
            y *= lax.broadcast_in_dim(scale_of(x_scale_ref.at[pl.ds(start * GRID, block)], 0), y.shape, [1])
        result = out_smem.at[warpgroup]
        store_transposed(result, y.astype(out_smem.dtype))
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
                w_ref.at[group, pl.ds(first, warpgroups * ROWS), some], w_smem.at[slot], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                x_ref.at[pl.ds(start * GRID, block), some], x_smem.at[slot], full.at[slot]
            )

        # wait for each slot's last release: every barrier phase must be observed
        for slot in range(min(stages, steps)):
            plgpu.barrier_wait(free.at[slot])

    pl.when((length > 0) & (warpgroup < warpgroups))(compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(memory)


def scale_of(ref: Any, reduced: int) -> jax.Array:
    """Loads a scale for each output or, if reduced is 0, for each row."""
    loaded: jax.Array = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(reduced), optimized=False)
    return loaded


def _converted(x: Any, dtype: jnp.dtype[Any]) -> jax.Array:
    """Loads eight-bit numbers [ROWS, COLUMNS] and converts them exactly to dtype, as an operand of the tensor
    cores.
    """
    loaded = plgpu.load(x, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if x.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float16)  # the hardware converts float8 to float16
    result: jax.Array = plgpu.layout_cast(loaded.astype(dtype), plgpu.Layout.WGMMA)
    return result
