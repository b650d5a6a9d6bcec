"""Scales of weights in the registers of a warpgroup."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic.ampere import fragment


def layout_of_scales(count: int) -> Any:
    """The layout of float32 [64, count]: each thread with a part of a row has all of the row's numbers."""
    tiles, lanes = ((64, count), (16, count), (8, count)), (-2, plgpu.Replicated(4))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=lanes, vector_dim=-1)


def columns_of(x: jax.Array, line: Any) -> list[jax.Array]:
    """Splits float32 [64, count], in `layout_of_scales`, into its columns [64], in the layout `line`."""
    count = x.shape[1]

    def split(_: Any, x: Any) -> Any:
        layout = line.to_mgpu()
        registers = np.array([elements(of_row) for of_row in x.registers.flat], object).T
        shape = layout.registers_shape((x.shape[0],))
        return [fragment(column.reshape(shape), layout) for column in registers]

    returned = [plgpu.ShapeDtypeStruct(x.shape[:1], x.dtype, layout=line)] * count
    columns: list[jax.Array] = plgpu.inline_mgpu(arg_types=(layout_of_scales(count),), return_type=returned)(
        split
    )(x)
    return columns


def elements(register: Any) -> list[Any]:
    """The elements of a register that holds a vector, as vectors."""
    count = ir.VectorType(register.type).shape[0]
    return [mgpu.utils.vector_slice(register, slice(i, i + 1)) for i in range(count)]
