"""Products of each row with the matrix of its group, as a Pallas Mosaic GPU kernel for Hopper (sm_90a).

`groups` gives the order of rows; matrices are [groups, out, in], as stored. A thread block computes a block of rows
of one group and 64 outputs per compute warpgroup. Outputs are the 64-row operand of the tensor cores, so a group
with few rows wastes little. That operand may be in registers, so eight-bit numbers are converted there. Groups
without rows are not read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.groups import GRID, Groups, block_rows
from pallas_kernels.hopper import COLUMNS, ROWS, store_transposed, tiled

STAGES = 4  # in flight: 64 KB of 16-bit weights per block; with small groups, a multiprocessor holds two blocks


def grouped_product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    groups: Groups,
    *,
    block: int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    operand_in_registers: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Multiplies each row of x by the matrix of its group.

    Args:
        x: bfloat16 or float16 [places, in], in the order of `groups`.
        weight: [groups, out, in] in x's dtype, int8 or float8_e4m3fn; out and in are multiples of 64.
        scale: float32 [groups, out], which multiplies results.
        groups: from `groups.grouped`.
        block: rows per thread block, from `groups.one_group`; None chooses for several groups.
        dtype: dtype of the result; None: x's.
        operand_in_registers: the tensor cores read eight-bit weights, converted, from registers. False goes through
            shared memory, which is slower but the only form that Pallas interprets.
        interpret: as in `plgpu.kernel`.

    Returns:
        [places, out]; undefined in places without a row.
    """
    out, block, dtype = weight.shape[1], block or block_rows(len(groups.place), len(weight)), jnp.dtype(dtype or x.dtype)
    warpgroups = 2 if out % (2 * ROWS) == 0 else 1
    through = None if operand_in_registers or weight.dtype == x.dtype else tiled((warpgroups, ROWS, COLUMNS), x.dtype)
    scratch = {
        "x_smem": tiled((STAGES, block, COLUMNS), x.dtype),
        "w_smem": tiled((STAGES, warpgroups * ROWS, COLUMNS), weight.dtype),
        "a_smem": through,
        "out_smem": plgpu.SMEM((warpgroups, block, ROWS), dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=STAGES),
    }
    y: jax.Array = plgpu.kernel(
        partial(_kernel, scaled=scale is not None),
        out_type=jax.ShapeDtypeStruct((len(x), out), dtype),
        scratch_types={name: what for name, what in scratch.items() if what is not None},
        grid=(len(groups.group), out // (warpgroups * ROWS)),  # a group's blocks run together, while its matrix is in the L2 cache
        grid_names=("block", "part"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="grouped_product",
        interpret=interpret,
    )(x, weight, groups.group, groups.start, groups.length, *([] if scale is None else [scale]))
    return y


def _kernel(
    x_ref: Any, w_ref: Any, group_ref: Any, start_ref: Any, length_ref: Any, *refs: Any,
    x_smem: Any, w_smem: Any, a_smem: Any = None, out_smem: Any, full: Any, free: Any, scaled: bool,
) -> None:  # fmt: skip
    *scale_ref, out_ref = refs
    stages, block, _ = x_smem.shape
    warpgroups, steps = out_smem.shape[0], x_ref.shape[1] // COLUMNS
    index, part, warpgroup = (lax.axis_index(name) for name in ("block", "part", "warpgroup"))
    group, start, length = group_ref[index], start_ref[index], length_ref[index]
    first = part * warpgroups * ROWS  # this block's first output

    def multiply(acc: Any) -> jax.Array:
        @pl.loop(0, steps)
        def _(i: jax.Array) -> None:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(full.at[slot])
            weights = w_smem.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
            if w_smem.dtype != x_smem.dtype:
                weights = _converted(weights, x_smem.dtype)
                if a_smem is not None:
                    a_smem[warpgroup] = weights
                    plgpu.commit_smem()
                    weights = a_smem.at[warpgroup]
            plgpu.wgmma(acc, weights, x_smem.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])

        result: jax.Array = acc[...]
        return result

    def compute() -> None:
        y = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, block), jnp.float32))
        mine = out_smem.at[warpgroup]
        outputs = pl.ds(first + warpgroup * ROWS, ROWS)
        if scaled:
            line = plgpu.load(scale_ref[0].at[group, outputs], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            y *= lax.broadcast_in_dim(line, y.shape, [0])
        store_transposed(mine, y.astype(out_smem.dtype))
        plgpu.commit_smem()
        at: Any = 0
        size = block // GRID
        while size:  # the length of a copy must be static
            taken = length & size
            from_smem, to = (ref.at[pl.ds(place * GRID, size * GRID)] for ref, place in ((mine, at), (out_ref, start + at)))
            pl.when(taken > 0)(partial(plgpu.copy_smem_to_gmem, from_smem, to.at[:, outputs]))
            at, size = at + taken, size // 2
        plgpu.wait_smem_to_gmem(0)

    def memory() -> None:
        @pl.loop(0, steps)
        def _(i: jax.Array) -> None:
            slot, columns = lax.rem(i, stages), pl.ds(i * COLUMNS, COLUMNS)
            pl.when(i >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
            plgpu.copy_gmem_to_smem(w_ref.at[group, pl.ds(first, warpgroups * ROWS), columns], w_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start * GRID, block), columns], x_smem.at[slot], full.at[slot])

        for slot in range(min(stages, steps)):  # wait for each slot's last release: every barrier phase must be observed
            plgpu.barrier_wait(free.at[slot])

    pl.when((length > 0) & (warpgroup < warpgroups))(compute)
    pl.when((length > 0) & (warpgroup == warpgroups))(memory)


def _converted(x: Any, dtype: jnp.dtype[Any]) -> jax.Array:
    """Loads eight-bit numbers [ROWS, COLUMNS] and converts them exactly to dtype, as an operand of the tensor cores."""
    loaded = plgpu.load(x, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    if x.dtype != jnp.int8:
        loaded = loaded.astype(jnp.float16)  # the hardware converts float8 to float16
    result: jax.Array = plgpu.layout_cast(loaded.astype(dtype), plgpu.Layout.WGMMA)
    return result
