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
from pallas_kernels.mosaic.words import MANTISSA, asm, bits_of, both, constant, rotated, shifted, words_of
from pallas_kernels.products.scales_in_registers import elements, layout_of_scales
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


def add_scaled(
    total: jax.Array,
    words: jax.Array,
    scale: jax.Array,
    offset: jax.Array | None,
    x: Any,
    tile: int,
    kind: str,
) -> jax.Array:
    """Adds a product with words int32 [64, 16], whose numbers are multiplied by their scales first.

    Four bits become the lowest bits of an exponent and the highest of a mantissa. They are right as subnormal
    numbers, too, in units of 2^-127 (e2m1) or 2^-129 (int4, plus 8), so that factors take up the unit. The
    signs of two nibbles of e2m1 are moved away from their magnitudes first, so that a rotation brings both to
    their places. A weight of int4 is rounded once, and its scale before; with offsets, so is the number that
    stands for zero, which is exact if it is an integer.

    Args:
        total: float32 [64, rows], in units of SCALED.
        scale, offset: float32 [64, groups of a tile], at most 2^62 in magnitude, of e2m1 powers of two. e2m1
            has no offset.
        x: bfloat16 [rows, TILE * n] in shared memory, in tiles of 8 by COLUMNS.
        tile: of x.
        kind: of the numbers.

    Returns:
        total plus the product, when the tensor cores are done.
    """

    def add(_: Any, total: Any, words: Any, x: Any, *scales: Any) -> Any:
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
            [*sums, first, *_scaled(words, kind, *scales)],
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
    scales = (scale,) if offset is None else (scale, offset)
    of_row = layout_of_scales(scale.shape[1])
    types = plgpu.Layout.WGMMA, WORD_LAYOUT, smem, *(of_row for _ in scales)
    returned = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=plgpu.Layout.WGMMA)
    run = plgpu.inline_mgpu(arg_types=types, return_type=returned)(add)
    result: jax.Array = run(total, words, x, *scales)
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


def _scaled(words: Any, kind: str, *scales: Any) -> list[Any]:
    """Pairs of scaled numbers, in units of SCALED, in the order of products and of their registers.

    Args:
        scales: scales, and perhaps offsets.
    """
    i32, (_, count, *_) = ir.IntegerType.get_signless(32), words.registers.shape
    nibbles = TILE // STEP
    pairs = np.empty((nibbles, count, 2), object)
    for half, of_row in enumerate(zip(*(numbers.registers.flat for numbers in scales), strict=True)):
        by_group = [elements(register) for register in of_row]
        groups = len(by_group[0])
        # for each two groups
        terms = [
            _terms(kind, *(of[min(n, groups - 1)] for of in by_group for n in (first, first + 1)))
            for first in range(0, groups, 2)
        ]
        for word in range(count):
            register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
            for nibble in range(nibbles):
                group = nibble * groups // nibbles
                if kind == "int4":
                    placed, code = shifted(register, 4 * nibble - 4), INT4_PAIR[len(scales) - 1]
                else:
                    signs = constant(0x88 << 4 * (nibble // 2 * 2))
                    apart = asm("lop3.b32 $0, $1, $2, $3, 0xe4;", register, rotated(register, 6), signs)
                    placed, code = rotated(apart, 4 * nibble - 12), E2M1_PAIR
                pairs[nibble, word, half] = asm(
                    code.replace("GROUP", str(group % 2)), placed, *terms[group // 2]
                )
    return list(pairs.flat)


def _terms(kind: str, *numbers: Any) -> list[Any]:
    """What an asm of pairs takes, for two groups: factors, and of int4 what is added to numbers or products.

    Args:
        numbers: two scales, and perhaps two offsets.
    """
    if kind == "e2m1":
        return [asm(BFLOAT16, *numbers, constant(0x5F00))]  # times 2^127 / SCALED
    if len(numbers) == 2:
        factors = asm(BFLOAT16, *numbers, constant(0x6000))  # times 2^129 / SCALED
        return [factors, asm("mul.rn.bf16x2 $0, $1, $2;", factors, constant(0x8080))]  # times -8 / 2^129
    scales, zeros = [asm("add.f32 $0, $1, 0f21800000;", scale) for scale in numbers[:2]], []
    for scale, offset in zip(scales, numbers[2:], strict=True):
        zeros.append(asm(ZERO, scale, offset))
    return [asm(BFLOAT16, *scales, constant(0x6000)), asm(BFLOAT16, *zeros, constant(0x0010))]


# Two floats as bfloat16, times a power of two.
BFLOAT16 = """{
    .reg .b32 f;
    cvt.rn.bf16x2.f32 f, $2, $1;
    mul.rn.bf16x2 $0, f, $3;
}"""
# The number, plus 8, of a weight that is zero. A scale of 0 was made 2^-60 before.
ZERO = """{
    .reg .f32 r, z;
    rcp.approx.ftz.f32 r, $1;
    neg.f32 z, $2;
    fma.rn.f32 $0, z, r, 0f41000000;
}"""
# Signs and magnitudes, times factors of a group.
E2M1_PAIR = """{
    .reg .b16 f<2>;
    .reg .b32 n, factor;
    mov.b32 {f0, f1}, $2;
    mov.b32 factor, {fGROUP, fGROUP};
    and.b32 n, $1, 0x81c081c0;
    mul.rn.bf16x2 $0, n, factor;
}"""
# Numbers plus 8, times factors of a group; minus eight factors, or before it minus the zero.
INT4_PAIR = [
    """{
    .reg .b16 f<2>, t<2>;
    .reg .b32 n, factor, term;
    mov.b32 {f0, f1}, $2;
    mov.b32 factor, {fGROUP, fGROUP};
    mov.b32 {t0, t1}, $3;
    mov.b32 term, {tGROUP, tGROUP};
    lop3.b32 n, $1, 0x00f000f0, 0x00800080, 0x6a;
    """
    + code
    + "\n}"
    for code in (
        "fma.rn.bf16x2 $0, n, factor, term;",
        "sub.rn.bf16x2 n, n, term;\nmul.rn.bf16x2 $0, n, factor;",
    )
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
