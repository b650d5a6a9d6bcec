"""The lines of products that a softmax needs, if a product has at most eight lines of use.

In plgpu.Layout.WGMMA a thread holds lines i and i + 8 of its warp's sixteen. The first kind is an array
[LINES, n] in LAYOUT, whose lines 0 to 7 are those of the product; the second kind is padding.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic.hopper import ROWS

USED, LINES = 8, ROWS // 2
TILING = mgpu.TiledLayout(
    plgpu.Tiling(((LINES, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
LAYOUT = plgpu.Layout.TILED(TILING.tiling, TILING.warp_dims, TILING.lane_dims, TILING.vector_dim)
ALL = plgpu.Layout.WGMMA


def first_lines(x: jax.Array) -> jax.Array:
    """[ROWS, n] in ALL -> [LINES, n]."""
    shape = LINES, x.shape[1]

    def take(_: Any, x: Any) -> Any:
        registers = x.registers[:, :, :, :, 0].reshape(TILING.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=TILING, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=LAYOUT)
    result: jax.Array = plgpu.inline_mgpu(arg_types=(ALL,), return_type=returned)(take)(x)
    return result


def all_lines(first: jax.Array, others: jax.Array | None = None) -> jax.Array:
    """[LINES, n] -> [ROWS, n] in ALL, with those of `others` [ROWS, n] as the other lines, or zeros."""
    shape = ROWS, first.shape[1]

    def put(_: Any, first: Any, *others: Any) -> Any:
        zero = mgpu.c(0, ir.IntegerType.get_signless(32))  # a register of 16-bit numbers
        registers = (
            others[0].registers.copy()
            if others
            else np.full(
                mgpu.WGMMA_LAYOUT.registers_shape(shape),
                mgpu.utils.bitcast(zero, first.registers.flat[0].type),
                object,
            )
        )
        into = registers[:, :, :, :, 0]
        into[...] = first.registers.reshape(into.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    arrays = (first,) if others is None else (first, others)
    returned = plgpu.ShapeDtypeStruct(shape, first.dtype, layout=ALL)
    result: jax.Array = plgpu.inline_mgpu(arg_types=(LAYOUT, ALL)[: len(arrays)], return_type=returned)(put)(
        *arrays
    )
    return result


def line_sums(x: jax.Array) -> jax.Array:
    """[LINES, n] -> [LINES], with the bits of the sums of an array [ROWS, n] in ALL: Mosaic gives a thread
    eight partial sums, which its lines share.
    """
    returned = plgpu.ShapeDtypeStruct((LINES,), x.dtype, layout=LAYOUT.reduce(1))
    add = plgpu.inline_mgpu(arg_types=(LAYOUT,), return_type=returned)
    result: jax.Array = add(lambda _, x: x.reduce("add", 1, acc_ilp=4))(x)
    return result


def per_line(x: jax.Array) -> jax.Array:
    """[LINES] -> [ROWS], the same for a thread's lines."""

    def repeat(_: Any, x: Any) -> Any:
        layout = mgpu.WGMMA_ROW_LAYOUT
        registers = np.full(layout.registers_shape((ROWS,)), x.registers.item(), object)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct((ROWS,), x.dtype, layout=ALL.reduce(1))
    result: jax.Array = plgpu.inline_mgpu(arg_types=(LAYOUT.reduce(1),), return_type=returned)(repeat)(x)
    return result
