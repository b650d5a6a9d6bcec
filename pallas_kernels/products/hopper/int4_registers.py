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
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.hopper import COLUMNS, ROWS, tiled
from pallas_kernels.mosaic.words import MANTISSA, asm, bits_of, both, constant, rotated, words_of
from pallas_kernels.products.scales_in_registers import layout_of_scales
from pallas_kernels.quantization.int4 import TILE, WORDS

STEP = 2 * WORDS  # columns in the same nibble of all words
WORD_LAYOUT = plgpu.Layout.TILED(  # int32 [64, 4 n], with a word in place of each pair of numbers in WGMMA
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
DEPTH = 16  # columns of a product of the tensor cores
UNIT = 16  # bytes, of addresses in descriptors
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


def add_scaled(total: jax.Array, words: jax.Array, scale: jax.Array, x: Any, tile: int) -> jax.Array:
    """Adds a product with words int32 [64, 16] of e2m1, whose numbers are multiplied by their scales first.

    The three bits of a magnitude become the lowest exponent bits and the highest mantissa bit of a number,
    which is the magnitude times 2^-127, also if it is subnormal. So its factor is the scale times 2^127. The
    signs of two nibbles are moved away from their magnitudes first, so that a rotation brings both to their
    places.

    Args:
        total: float32 [64, rows], in units of SCALED.
        scale: float32 [64, 4], powers of two.
        x: bfloat16 [rows, TILE * n] in shared memory, in tiles of 8 by COLUMNS.
        tile: of x.

    Returns:
        total plus the product, when the tensor cores are done.
    """

    def add(_: Any, total: Any, words: Any, scale: Any, x: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        sums = [word for register in total.registers.flat for word in words_of(register)]
        count = len(sums)
        names = ", ".join(f"${n}" for n in range(count))
        shape = f"m64n{2 * count}k{DEPTH}.f32.bf16.bf16"
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
            [*sums, first, *_scaled(words, scale)],
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
    types = plgpu.Layout.WGMMA, WORD_LAYOUT, layout_of_scales(scale.shape[1]), smem
    returned = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA)
    result: jax.Array = plgpu.inline_mgpu(arg_types=types, return_type=returned)(add)(total, words, scale, x)
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


def _scaled(words: Any, scale: Any) -> list[Any]:
    """Pairs of scaled numbers, in units of SCALED, in the order of products and of their registers."""
    i32, (_, count, *_) = ir.IntegerType.get_signless(32), words.registers.shape
    pairs = np.empty((TILE // STEP, count, 2), object)
    for half, of_row in enumerate(scale.registers.flat):
        of_groups = [mgpu.utils.vector_slice(of_row, slice(n, n + 1)) for n in range(TILE // STEP)]
        factors = [asm(FACTORS, *of_groups[first : first + 2]) for first in (0, 2)]
        for word in range(count):
            register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
            for nibble in range(len(of_groups)):
                signs = constant(0x88 << 4 * (nibble // 2 * 2))
                apart = asm("lop3.b32 $0, $1, $2, $3, 0xe4;", register, rotated(register, 6), signs)
                placed = rotated(apart, 4 * nibble - 12)
                pairs[nibble, word, half] = asm(SCALED_PAIR[nibble % 2], placed, factors[nibble // 2])
    return list(pairs.flat)


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
