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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic.hopper import COLUMNS, tiled
from pallas_kernels.mosaic.words import (
    AND_XOR,
    BIAS,
    MANTISSA,
    asm,
    bits_of,
    constant,
    rotated,
    shifted,
    words_of,
)
from pallas_kernels.products.scales_in_registers import elements, layout_of_scales
from pallas_kernels.quantization.int4 import TILE, WORDS

STEP = 2 * WORDS  # columns in the same nibble of all words
WORD_LAYOUT = plgpu.Layout.TILED(  # int32 [64, 4 n], with a word in place of each pair of numbers in WGMMA
    plgpu.Tiling(((64, 4), (16, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)
DEPTH = 16  # columns of a product of the tensor cores
UNIT = 16  # bytes, of addresses in descriptors
# The unit of scaled weights. Without it, factors would be too large for their dtype.
SCALED = {"bfloat16": 2.0**64, "float16": 2.0**6}
PAIR = {"bfloat16": "bf16x2", "float16": "f16x2"}


def add_scaled(
    total: jax.Array, words: jax.Array, scales: Sequence[jax.Array], x: Any, tile: int, kind: str
) -> jax.Array:
    """Adds a product with words int32 [64, 16], whose numbers are multiplied by their scales first.

    Four bits become the lowest bits of an exponent and the highest of a mantissa. As subnormal numbers they
    are right, too, so that factors take up the unit. The signs of two nibbles of e2m1 are moved away from
    their magnitudes first, so that a rotation brings both to their places. int4 plus 8 is not negative; a
    weight is rounded once, and its scale before. With offsets in bfloat16, the number that stands for zero is
    subtracted, which is exact if it is an integer; float16 rounds offsets less.

    Args:
        total: float32 [64, rows], in units of SCALED.
        scales: scales and perhaps offsets, float32 [64, groups of a tile] each. Of e2m1 only powers of two.
        x: bfloat16, or for int4 float16 [rows, TILE * n], in shared memory in tiles of 8 by COLUMNS.
        tile: of x.
        kind: of the numbers.

    Returns:
        total plus the product, when the tensor cores are done.
    """
    dtype = x.dtype

    def add(_: Any, total: Any, words: Any, x: Any, *scales: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        sums = [word for register in total.registers.flat for word in words_of(register)]
        count = len(sums)
        names = ", ".join(f"${n}" for n in range(count))
        of = PAIR[str(dtype)].removesuffix("x2")
        shape = f"m64n{2 * count}k{DEPTH}.f32.{of}.{of}"
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
            [*sums, first, *_scaled(words, scales, kind, dtype)],
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
    types = plgpu.Layout.WGMMA, WORD_LAYOUT, smem, *(layout_of_scales(scale.shape[1]) for scale in scales)
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


def _scaled(words: Any, scales: Sequence[Any], kind: str, dtype: jnp.dtype[Any]) -> list[Any]:
    """Pairs of scaled numbers, in units of SCALED, in the order of products and of their registers."""
    i32, (_, count, *_) = ir.IntegerType.get_signless(32), words.registers.shape
    nibbles, low = TILE // STEP, MANTISSA[dtype] - 3  # where an int4 number begins
    pairs = np.empty((nibbles, count, 2), object)
    for half, of_row in enumerate(zip(*(array.registers.flat for array in scales), strict=True)):
        by_group = [elements(register) for register in of_row]
        groups = len(by_group[0])
        # two groups each
        terms = [
            _terms(dtype, kind, *(of[min(n, groups - 1)] for of in by_group for n in (first, first + 1)))
            for first in range(0, groups, 2)
        ]
        for word in range(count):
            register = mgpu.utils.bitcast(words.registers[0, word, 0, 0, half].item(), i32)
            for nibble in range(nibbles):
                if kind == "int4":
                    placed = shifted(register, 4 * nibble - low)
                    number = asm(AND_XOR, placed, constant(0xF << low), constant(8 << low))
                else:
                    signs = constant(0x88 << 4 * (nibble // 2 * 2))
                    apart = asm("lop3.b32 $0, $1, $2, $3, 0xe4;", register, rotated(register, 6), signs)
                    number = asm("and.b32 $0, $1, $2;", rotated(apart, 4 * nibble - 12), constant(0x81C0))
                group = nibble * groups // nibbles
                code, *of_groups = terms[group // 2]
                code = code.replace("GROUP", str(group % 2)).replace("TYPE", PAIR[str(dtype)])
                pairs[nibble, word, half] = asm(code, number, *of_groups)
    return list(pairs.flat)


def _terms(dtype: jnp.dtype[Any], kind: str, *scales: Any) -> tuple[Any, ...]:
    """The code that makes weights of two groups' numbers, and what it takes for both.

    Args:
        scales: two scales, and perhaps two offsets.
    """
    name, bias = str(dtype), BIAS[dtype]

    def pair(of_groups: Sequence[Any], factor: float) -> Any:
        code = ROUNDED.replace("TYPE", PAIR[name])
        return asm(code, *of_groups, constant(bits_of(factor, dtype)))

    if kind == "e2m1":
        return MULTIPLIED, pair(scales, 2.0**bias / SCALED[name])
    unit = 2.0 ** (bias + 2) / SCALED[name]  # int4 numbers are in units of 2^(-2 - bias)
    if len(scales) == 2:
        factors, eight = pair(scales, unit), constant(bits_of(-(2.0 ** (1 - bias)), dtype))
        return MULTIPLIED_AND_ADDED, factors, asm(f"mul.rn.{PAIR[name]} $0, $1, $2;", factors, eight)
    of_groups = list(zip(scales[:2], scales[2:], strict=True))
    if name == "float16":
        lowest = [asm("fma.rn.f32 $0, $1, 0fc1000000, $2;", *of_group) for of_group in of_groups]
        return MULTIPLIED_AND_ADDED, pair(scales[:2], unit), pair(lowest, 1 / SCALED[name])
    positive = [asm("add.f32 $0, $1, 0f21800000;", scale) for scale in scales[:2]]  # 0 becomes 2^-60
    zeros = [asm(ZERO, scale, offset) for scale, offset in zip(positive, scales[2:], strict=True)]
    return SUBTRACTED_AND_MULTIPLIED, pair(positive, unit), pair(zeros, 2.0 ** (-2 - bias))


# Two floats, rounded, times a power of two.
ROUNDED = """{
    .reg .b32 f;
    cvt.rn.TYPE.f32 f, $2, $1;
    mul.rn.TYPE $0, f, $3;
}"""
# 8 - offset / scale: the number, plus 8, of a weight that is zero.
ZERO = """{
    .reg .f32 r, z;
    rcp.approx.ftz.f32 r, $1;
    neg.f32 z, $2;
    fma.rn.f32 $0, z, r, 0f41000000;
}"""
TERM = "mov.b32 {h0, h1}, $3; mov.b32 term, {hGROUP, hGROUP};"
MULTIPLIED, MULTIPLIED_AND_ADDED, SUBTRACTED_AND_MULTIPLIED = (
    f"""{{
    .reg .b16 h<2>;
    .reg .b32 n, factor, term;
    mov.b32 {{h0, h1}}, $2;
    mov.b32 factor, {{hGROUP, hGROUP}};
    {code}
}}"""
    for code in (
        "mul.rn.TYPE $0, $1, factor;",
        f"{TERM} fma.rn.TYPE $0, $1, factor, term;",
        f"{TERM} sub.rn.TYPE n, $1, term; mul.rn.TYPE $0, n, factor;",
    )
)
