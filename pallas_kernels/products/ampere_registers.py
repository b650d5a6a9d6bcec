"""Unpacks weights in a warpgroup's registers to a left side of `mma.sync`, without exchanging data between
lanes.

A product of a warp adds 16 inputs, of which each of four lanes has two pairs. Their order does not matter if
both sides have the same. So a lane takes four adjacent inputs, by one load of either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ampere import DEPTH, NUMBERS, ROWS, fragment, left_registers, left_side
from pallas_kernels.mosaic.words import of_bytes, pair_of, words_of
from pallas_kernels.products.four_bit_numbers import ScaledNumbers
from pallas_kernels.products.groups import GRID
from pallas_kernels.products.scales_in_registers import elements, layout_of_scales
from pallas_kernels.quantization.int4 import KINDS, TILE

OUTS = ROWS  # of a warpgroup
WORDS = plgpu.Layout.TILED(  # int32 [OUTS, 16], four-bit numbers
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
SUMS = plgpu.Layout.MMA_ACC(np.dtype("float16"))  # [OUTS, rows]
APART = plgpu.Layout.TILED(  # sums [OUTS, GRID], a number in each register
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)


def layout_of_weights(kind: str) -> Any:
    """The layout of a tile of weights."""
    return WORDS if kind in KINDS else NUMBERS


def by_grid(sums: jax.Array) -> list[jax.Array]:
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


def operand(weights: jax.Array, step: int, kind: str, dtype: Any) -> jax.Array:
    """Unpacks DEPTH inputs of a tile of weights of eight or sixteen bits: [OUTS, DEPTH] in dtype, a 16-bit
    float, as a left side.
    """

    def of_words(words: list[Any]) -> list[Any]:
        return of_bytes(words[0], kind, dtype) if len(words) == 1 else words

    return left_side(weights, NUMBERS, (step, 0, 0), of_words, dtype)


def scaled_operands(
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

    layouts = WORDS, *(layout_of_scales(array.shape[1]) for array in scales)
    returned = plgpu.ShapeDtypeStruct((OUTS, DEPTH), dtype, layout=plgpu.Layout.MMA_LHS(dtype))
    converted = plgpu.inline_mgpu(arg_types=layouts, return_type=[returned] * (TILE // DEPTH))(convert)
    operands: list[jax.Array] = converted(weights, *scales)
    return operands
