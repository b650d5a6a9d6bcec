"""Unpacks weights in a warpgroup's registers to a left side of `mma.sync`, without exchanging data between
lanes.

A product of a warp adds 16 inputs, of which each of four lanes has two pairs. Their order does not matter if
both sides have the same. So a lane takes four adjacent inputs, by one load of either side.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic.words import BIAS, MANTISSA, asm, bits_of, constant, shifted
from pallas_kernels.products.groups import GRID
from pallas_kernels.quantization.formats import FP8
from pallas_kernels.quantization.int4 import KINDS

OUTS = 64  # of a warpgroup
DEPTH = 16  # inputs of a product
WORDS = plgpu.Layout.TILED(  # int32 [OUTS, 16], four-bit numbers
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
NUMBERS = plgpu.Layout.TILED(  # [OUTS, n] of eight or sixteen bits
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
INPUTS = plgpu.Layout.TILED(  # [rows, DEPTH]
    plgpu.Tiling(((8, 16), (4,))), warp_dims=(plgpu.Replicated(4),), lane_dims=(-3, -2), vector_dim=-1
)
SUMS = plgpu.Layout.MMA_ACC(np.dtype("float16"))  # [OUTS, rows]
APART = plgpu.Layout.TILED(  # sums [OUTS, GRID], a number in each register
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))), warp_dims=(-8,), lane_dims=(-4, -3), vector_dim=-1
)
MULTIPLY_ADD = {"bfloat16": "fma.rn.bf16x2 $0, $1, $2, $3;", "float16": "fma.rn.f16x2 $0, $1, $2, $3;"}
AND_XOR, AND_OR = (f"lop3.b32 $0, $1, $2, $3, {table};" for table in ("0x6a", "0xea"))


def layout_of_scales(count: int) -> Any:
    """The layout of float32 [OUTS, count]: each thread with a part of a row has all of the row's numbers."""
    tiles, lanes = ((64, count), (16, count), (8, count)), (-2, plgpu.Replicated(4))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=lanes, vector_dim=-1)


def layout_of_weights(kind: str) -> Any:
    """The layout of a tile of weights."""
    return WORDS if kind in KINDS else NUMBERS


def columns_of(x: jax.Array) -> list[jax.Array]:
    """Splits float32 [OUTS, count] into its columns [OUTS]."""
    count, line = x.shape[1], SUMS.reduce(1)

    def split(_: Any, x: Any) -> Any:
        layout = line.to_mgpu()
        registers = np.array([_elements(of_row) for of_row in x.registers.flat], object).T
        shape = layout.registers_shape((OUTS,))
        return [_fragment(column.reshape(shape), layout) for column in registers]

    returned = [plgpu.ShapeDtypeStruct((OUTS,), x.dtype, layout=line)] * count
    columns: list[jax.Array] = plgpu.inline_mgpu(arg_types=(layout_of_scales(count),), return_type=returned)(
        split
    )(x)
    return columns


def by_grid(sums: jax.Array) -> list[jax.Array]:
    """Splits the sums [OUTS, rows] into arrays of GRID rows that can be stored transposed."""

    def split(_: Any, sums: Any) -> Any:
        layout = APART.to_mgpu()
        shape = layout.registers_shape((OUTS, GRID))
        columns = np.moveaxis(sums.registers, 1, 0)
        apart = [np.array([*map(_elements, column.flat)], object) for column in columns]
        return [_fragment(registers.reshape(shape), layout) for registers in apart]

    returned = [plgpu.ShapeDtypeStruct((OUTS, GRID), sums.dtype, layout=APART)] * (sums.shape[1] // GRID)
    arrays: list[jax.Array] = plgpu.inline_mgpu(arg_types=(SUMS,), return_type=returned)(split)(sums)
    return arrays


def operand(weights: jax.Array, step: int, kind: str, dtype: Any) -> jax.Array:
    """Unpacks DEPTH inputs of a tile of weights: [OUTS, DEPTH] in dtype, a 16-bit float, as a left side."""
    layout = plgpu.Layout.MMA_LHS(dtype)

    def unpack(_: Any, weights: Any) -> Any:
        fragment = layout.to_mgpu()
        registers = np.empty(fragment.registers_shape((OUTS, DEPTH)), object)
        for half in range(2):  # of a warp's rows
            if kind in KINDS:
                words = _words(weights.registers[0, step % 2, 0, 0, half].item())
                pairs = [_of_nibble(word, step // 2, kind, dtype) for word in words]
            else:
                words = _words(weights.registers[0, step, 0, 0, half].item())
                if len(words) == 1:
                    pairs = [_of_bytes(words[0], odd, kind, dtype) for odd in range(2)]
                else:  # of sixteen bits
                    pairs = words
            for place, pair in enumerate(pairs):
                registers[0, 0, 0, place, half] = _as_pair(pair, dtype)
        return _fragment(registers, fragment)

    returned = plgpu.ShapeDtypeStruct((OUTS, DEPTH), dtype, layout=layout)
    unpacked: jax.Array = plgpu.inline_mgpu(arg_types=(layout_of_weights(kind),), return_type=returned)(
        unpack
    )(weights)
    return unpacked


def inputs_of(x: jax.Array, kind: str) -> jax.Array:
    """The inputs [rows, DEPTH] as a right side [DEPTH, rows], in the order of weights of this kind."""
    layout, shape = plgpu.Layout.MMA_RHS(x.dtype), x.shape[::-1]

    def order(_: Any, x: Any) -> Any:
        fragment = layout.to_mgpu()
        registers = np.empty(fragment.registers_shape(shape), object)
        for column, register in enumerate(x.registers.flat):
            words = _words(register)
            if kind in ("int8", FP8):
                words = [asm(f"prmt.b32 $0, $1, $2, {picked};", *words) for picked in ("0x5410", "0x7632")]
            for place, word in enumerate(words):
                registers[0, column, place] = mgpu.utils.bitcast(word, ir.VectorType.get((2,), x.mlir_dtype))
        return _fragment(registers, fragment)

    returned = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=layout)
    ordered: jax.Array = plgpu.inline_mgpu(arg_types=(INPUTS,), return_type=returned)(order)(x)
    return ordered


def _fragment(registers: Any, layout: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _elements(register: Any) -> list[Any]:
    """The elements of a register that holds a vector, as vectors."""
    count = ir.VectorType(register.type).shape[0]
    return [mgpu.utils.vector_slice(register, slice(i, i + 1)) for i in range(count)]


def _words(register: Any) -> list[Any]:
    """The words of a register that holds a vector."""
    vector, i32 = ir.VectorType(register.type), ir.IntegerType.get_signless(32)
    size = vector.shape[0] // (mgpu.bitwidth(vector) // 32)  # elements of a word
    parts = (slice(first, first + size) for first in range(0, vector.shape[0], size))
    return [mgpu.utils.bitcast(mgpu.utils.vector_slice(register, part), i32) for part in parts]


def _as_pair(word: Any, dtype: Any) -> Any:
    return mgpu.utils.bitcast(word, ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype)))


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
        return _multiplied(bits, bits_of(1, dtype), bits_of(-power - 8, dtype), dtype)
    magnitude = asm(
        "and.b32 $0, $1, $2;", shifted(word, 4 * nibble + 1 - mantissa), constant(7 << mantissa - 1)
    )
    bits = asm(AND_OR, shifted(word, 4 * nibble - 12), constant(1 << 15), magnitude)
    return _multiplied(bits, bits_of(2.0 ** BIAS[dtype], dtype), bits_of(-0.0, dtype), dtype)


def _of_bytes(word: Any, odd: int, kind: str, dtype: Any) -> Any:
    """The numbers in the even or the odd bytes of a word.

    For bfloat16, seven bits of an int8 number are added to 128; the sign bit doubles the 128 that is then
    subtracted. For float16, the number plus 128 is unsigned. Exponent and mantissa of e4m3 become the lowest
    exponent bits and the highest mantissa bits.
    """
    mantissa = MANTISSA[dtype]
    if kind == "int8":
        word, power = shifted(word, 8 * odd), constant(bits_of(1 << mantissa, dtype))
        if mantissa < 8:
            low, sign = (asm(AND_OR, word, constant(bits), power) for bits in (0x7F, 0x80))
            return asm(MULTIPLY_ADD[str(dtype)], sign, constant(bits_of(-1, dtype)), low)
        bits = asm(AND_XOR, word, constant(0xFF), constant(bits_of(1 << mantissa, dtype) | 0x80))
        return _multiplied(bits, bits_of(1, dtype), bits_of(-(1 << mantissa) - 128, dtype), dtype)
    up = 0 if odd else 8  # so that the byte is the upper one of its half
    magnitude = shifted(word, 11 - mantissa - up)
    magnitude = asm("and.b32 $0, $1, $2;", magnitude, constant(0x7F << mantissa - 3))
    bits = asm(AND_OR, shifted(word, -up), constant(1 << 15), magnitude)
    return _multiplied(bits, bits_of(2.0 ** (BIAS[dtype] - 7), dtype), bits_of(-0.0, dtype), dtype)


def _multiplied(pair: Any, factor: int, added: int, dtype: Any) -> Any:
    """Numbers times a factor, plus a number; both given as bits."""
    return asm(MULTIPLY_ADD[str(dtype)], pair, constant(factor), constant(added))
