"""Unpacks four-bit numbers in a warpgroup's registers to an operand of the tensor cores, without exchanging
data between lanes.

A thread loads words j, j + 4, j + 8 and j + 12 of a row's tile. Bits 4 k to 4 k + 3 of both halves of these
words are the pairs of adjacent numbers that the tensor cores expect from this thread in columns 32 k to 32 k
+ 31.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic.hopper import ROWS
from pallas_kernels.mosaic.words import MANTISSA, asm, bits_of, both, constant, rotated
from pallas_kernels.quantization.int4 import TILE, WORDS

STEP = 2 * WORDS  # columns in the same nibble of all words
WORD_TILING = mgpu.TiledLayout(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)  # int32 [64, 4 n], with a word in place of each pair of numbers in plgpu.Layout.WGMMA
WORD_LAYOUT = plgpu.Layout.TILED(
    WORD_TILING.tiling, WORD_TILING.warp_dims, WORD_TILING.lane_dims, WORD_TILING.vector_dim
)
SCALE_TILING = mgpu.TiledLayout(
    plgpu.Tiling(((64, 4), (16, 4), (8, 4))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)  # float32 [64, 4]; each thread that holds a part of a row has all four of the row's numbers
SCALE_LAYOUT = plgpu.Layout.TILED(
    SCALE_TILING.tiling, SCALE_TILING.warp_dims, SCALE_TILING.lane_dims, SCALE_TILING.vector_dim
)
SCALED = 2.0**64  # unit of scaled weights, whose factors would be infinite without it


def factor(kind: str) -> float:
    """The factor by which the result of `numbers` must be multiplied."""
    return 0.5 if kind == "e2m1" else 1.0


def numbers(
    words: jax.Array, nibbles: Sequence[int], kind: str, dtype: jnp.dtype[Any], in_registers: bool
) -> jax.Array:
    """Unpacks some nibbles of words int32 [64, 16] to [64, 32 * len(nibbles)], in units of `factor`.

    Args:
        in_registers: unpack to an operand of the tensor cores. False: use only operations that Pallas
            interprets.
    """
    pairs, taken = (_pairs_in_registers, _and_xor_in_registers) if in_registers else (_pairs, _and_xor)
    mantissa = MANTISSA[jnp.dtype(dtype)]
    if kind == "int4":
        # The number plus 8 is unsigned. It becomes the lowest bits of a power of two; then the power and 8
        # are subtracted.
        power = 1 << mantissa
        bits = [taken(_right(words, 4 * k), 15, bits_of(power, dtype) | 8) for k in nibbles]
        return pairs(bits, dtype) - jnp.asarray(power + 8, dtype)
    # A code has two exponent bits and one mantissa bit. They become the lowest exponent bits and the highest
    # mantissa bit of a number x >= 2, which is twice the magnitude. If the exponent is zero, the number is
    # subnormal (it has no implicit one), and 2 (x - 2) is twice the magnitude. It is then the smaller of the
    # two.
    magnitude = [
        taken(_right(words, 4 * k + 1 - mantissa), 7 << mantissa - 1, bits_of(2, dtype)) for k in nibbles
    ]
    sign = [_right(words, 4 * k - 12) & both(1 << 15) for k in nibbles]
    wide = pairs(magnitude, dtype)
    wide = jnp.minimum(wide, wide * 2 - 4)
    signed = lax.bitcast_convert_type(wide, jnp.int16) ^ pairs(sign, jnp.dtype("int16"))
    return lax.bitcast_convert_type(signed, dtype)


def scaled(words: jax.Array, scale: jax.Array) -> jax.Array:
    """Unpacks words int32 [64, 16] of e2m1 and multiplies the numbers by their scales.

    The three bits of a magnitude become the lowest exponent bits and the highest mantissa bit of a number,
    which is the magnitude times 2^-127, also if it is subnormal. So its factor is the scale times 2^127. The
    signs of two nibbles are moved away from their magnitudes first, so that a rotation brings both to their
    places.

    Args:
        scale: float32 [64, 4], powers of two.

    Returns:
        An operand of the tensor cores, bfloat16 [64, TILE], in units of SCALED.
    """

    def multiply(_: Any, words: Any, scale: Any) -> Any:
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, TILE)), object)
        count = words.registers.shape[1]
        for half, of_row in enumerate(scale.registers.flat):
            of_groups = [mgpu.utils.vector_slice(of_row, slice(n, n + 1)) for n in range(TILE // STEP)]
            factors = [asm(FACTORS, *of_groups[first : first + 2]) for first in (0, 2)]
            for word in range(count):
                register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
                for nibble in range(len(of_groups)):
                    signs = constant(0x88 << 4 * (nibble // 2 * 2))
                    apart = asm("lop3.b32 $0, $1, $2, $3, 0xe4;", register, rotated(register, 6), signs)
                    placed = rotated(apart, 4 * nibble - 12)
                    number = asm(SCALED_PAIR[nibble % 2], placed, factors[nibble // 2])
                    registers[0, word + nibble * count, 0, 0, half] = mgpu.utils.bitcast(number, pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct((ROWS, TILE), jnp.dtype("bfloat16"), layout=plgpu.Layout.WGMMA)
    result: jax.Array = plgpu.inline_mgpu(arg_types=(WORD_LAYOUT, SCALE_LAYOUT), return_type=returned)(
        multiply
    )(words, scale)
    return result


# The factors of two nibbles, 2^127 / SCALED times their scales; signs and magnitudes, times one of these.
FACTORS = """{
    .reg .f32 s<2>;
    .reg .b32 f, unit;
    mov.b32 s0, $1;
    mov.b32 s1, $2;
    cvt.rn.bf16x2.f32 f, s1, s0;
    mov.b32 unit, 0x5f005f00;
    mul.rn.bf16x2 $0, f, unit;
}"""
SCALED_PAIR = [
    f"""{{
    .reg .b16 f<2>;
    .reg .b32 n, factor;
    mov.b32 {{f0, f1}}, $2;
    mov.b32 factor, {{f{nibble}, f{nibble}}};
    and.b32 n, $1, 0x81c081c0;
    mul.rn.bf16x2 $0, n, factor;
}}"""
    for nibble in range(2)
]


def _right(words: jax.Array, bits: int) -> jax.Array:
    """Shifts words to the right, or to the left if `bits` is negative. Bits shifted in are undefined."""
    return words >> bits if bits > 0 else words << -bits if bits < 0 else words


def _and_xor(words: jax.Array, mask: int, flipped: int) -> jax.Array:
    """(words & mask) ^ flipped, in both halves of each word."""
    taken: jax.Array = words & both(mask) ^ both(flipped)
    return taken


def _and_xor_in_registers(words: jax.Array, mask: int, flipped: int) -> jax.Array:
    """`_and_xor` in one instruction. The compiler would use two because there are two
    constants.
    """

    def take(_: Any, words: Any) -> Any:
        constants = [constant(half) for half in (mask, flipped)]
        registers = np.empty_like(words.registers)
        for at, register in np.ndenumerate(words.registers):
            word = asm("lop3.b32 $0, $1, $2, $3, 0x6a;", register, *constants)  # ($1 & $2) ^ $3
            registers[at] = mgpu.utils.bitcast(word, register.type)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)

    returned = plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=WORD_LAYOUT)
    result: jax.Array = plgpu.inline_mgpu(arg_types=(WORD_LAYOUT,), return_type=returned)(take)(words)
    return result


def _pairs(bits: Sequence[jax.Array], dtype: jnp.dtype[Any]) -> jax.Array:
    """Interprets each array of words int32 [64, 16] as pairs of numbers, and concatenates them: [64, 32 *
    len(bits)].
    """
    return jnp.concatenate([lax.bitcast_convert_type(word, dtype).reshape(ROWS, -1) for word in bits], axis=1)


def _pairs_in_registers(bits: Sequence[jax.Array], dtype: jnp.dtype[Any]) -> jax.Array:
    shape = ROWS, STEP * len(bits)

    def join(_: Any, *words: Any) -> Any:
        element = mgpu.utils.dtype_to_ir_type(dtype)
        pair = ir.VectorType.get((2,), element)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape(shape), object)
        for step, of_step in enumerate(words):
            for place, word in np.ndenumerate(of_step.registers):
                column = place[1] + step * of_step.registers.shape[1]
                registers[place[0], column, *place[2:]] = mgpu.utils.bitcast(word, pair)
        signed = False if isinstance(element, ir.IntegerType) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=signed)

    returned = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)
    result: jax.Array = plgpu.inline_mgpu(arg_types=tuple(WORD_LAYOUT for _ in bits), return_type=returned)(
        join
    )(*bits)
    return result


def columns_of(x: jax.Array, in_registers: bool) -> list[jax.Array]:
    """Splits float32 [64, 4] into four columns [64]."""
    if not in_registers:
        return [x[:, column] for column in range(x.shape[1])]

    def split(_: Any, x: Any) -> Any:
        columns = []
        for column in range(x.shape[1]):
            registers = np.empty(mgpu.WGMMA_ROW_LAYOUT.registers_shape((ROWS,)), object)
            for into, register in zip(np.ndindex(registers.shape), x.registers.flat, strict=True):
                registers[into] = mgpu.utils.vector_slice(register, slice(column, column + 1))
            columns.append(
                mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_ROW_LAYOUT, _is_signed=None)
            )
        return columns

    line = plgpu.ShapeDtypeStruct((ROWS,), x.dtype, layout=plgpu.Layout.WGMMA.reduce(1))
    result: list[jax.Array] = plgpu.inline_mgpu(arg_types=(SCALE_LAYOUT,), return_type=[line] * x.shape[1])(
        split
    )(x)
    return result
