"""Unpacks weights in a warpgroup's registers to a left side of `mma.sync`, without exchanging data between
lanes.

A product of a warp adds 16 inputs, of which each of four lanes has two pairs. Their order does not matter if
both sides have the same. So a lane takes four adjacent inputs, by one load of either side.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.ampere import NUMBERS, ROWS, fragment, left_side
from pallas_kernels.mosaic.words import (
    AND_OR,
    AND_XOR,
    BIAS,
    MANTISSA,
    asm,
    bits_of,
    constant,
    multiplied,
    of_bytes,
    shifted,
)
from pallas_kernels.products.groups import GRID
from pallas_kernels.products.scales_in_registers import elements
from pallas_kernels.quantization.int4 import KINDS

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
    """Unpacks DEPTH inputs of a tile of weights: [OUTS, DEPTH] in dtype, a 16-bit float, as a left side."""

    def of_words(words: list[Any]) -> list[Any]:
        if kind in KINDS:
            return [_of_nibble(word, step // 2, kind, dtype) for word in words]
        return of_bytes(words[0], kind, dtype) if len(words) == 1 else words  # of eight or sixteen bits

    place = (step % 2, 0, 0) if kind in KINDS else (step, 0, 0)
    return left_side(weights, layout_of_weights(kind), place, of_words, dtype)


def _of_nibble(word: Any, nibble: int, kind: str, dtype: Any) -> Any:
    """The numbers in a nibble of both halves of a word.

    An int4 number plus 8 is unsigned. It becomes the lowest bits of a power of two; then the power and 8 are
    subtracted. A magnitude of e2m1 becomes the lowest exponent bits and the highest mantissa bit, also if it
    is subnormal. Twice the magnitude is that number times 2^BIAS.
    """
    mantissa = MANTISSA[dtype]
    if kind == "int4":
        power = 1 << mantissa
        bits = asm(AND_XOR, shifted(word, 4 * nibble), constant(15), constant(bits_of(power, dtype) | 8))
        return multiplied(bits, bits_of(1, dtype), bits_of(-power - 8, dtype), dtype)
    magnitude = asm(
        "and.b32 $0, $1, $2;", shifted(word, 4 * nibble + 1 - mantissa), constant(7 << mantissa - 1)
    )
    bits = asm(AND_OR, shifted(word, 4 * nibble - 12), constant(1 << 15), magnitude)
    return multiplied(bits, bits_of(2.0 ** BIAS[dtype], dtype), bits_of(-0.0, dtype), dtype)
