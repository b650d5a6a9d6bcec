"""PTX on words in registers, inside `plgpu.inline_mgpu`, and words of two 16-bit floats."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

MANTISSA = {jnp.dtype("bfloat16"): 7, jnp.dtype("float16"): 10}  # bits
BIAS = {jnp.dtype("bfloat16"): 127, jnp.dtype("float16"): 15}  # of the exponent
MULTIPLY_ADD = {"bfloat16": "fma.rn.bf16x2 $0, $1, $2, $3;", "float16": "fma.rn.f16x2 $0, $1, $2, $3;"}
AND_XOR, AND_OR = (f"lop3.b32 $0, $1, $2, $3, {table};" for table in ("0x6a", "0xea"))


def asm(code: str, *operands: Any) -> Any:
    """PTX with a word as its result and with words or a float as operands."""
    i32 = ir.IntegerType.get_signless(32)
    words = [mgpu.utils.bitcast(x, i32) for x in operands]
    return llvm.inline_asm(i32, words, code, ",".join(["=r"] + ["r"] * len(words)), has_side_effects=False)


def shifted(word: Any, bits: int) -> Any:
    """Shifts to the right, or to the left if `bits` is negative."""
    by = mgpu.c(abs(bits), word.type)
    return word if bits == 0 else arith.shrui(word, by) if bits > 0 else arith.shli(word, by)


def rotated(word: Any, bits: int) -> Any:
    """Rotates to the right, or to the left if `bits` is negative."""
    return word if bits % 32 == 0 else arith.ori(shifted(word, bits % 32), shifted(word, bits % 32 - 32))


def constant(half: int) -> Any:
    """A word with this number in both halves, in a register."""
    word = np.uint32(half << 16 | half).astype(np.int32)
    return mgpu.c(int(word), ir.IntegerType.get_signless(32))


def bits_of(number: float, dtype: jnp.dtype[Any]) -> int:
    """The bits of a 16-bit float."""
    return int(np.asarray(number, dtype).view(np.uint16))


def multiplied(pair: Any, factor: int, added: int, dtype: jnp.dtype[Any]) -> Any:
    """Numbers times a factor, plus a number; both given as bits."""
    return asm(MULTIPLY_ADD[str(dtype)], pair, constant(factor), constant(added))


def of_bytes(word: Any, kind: str, dtype: jnp.dtype[Any]) -> list[Any]:
    """The numbers in the even and in the odd bytes of a word, int8 or else float8_e4m3fn.

    For bfloat16, seven bits of an int8 number are added to 128; the sign bit doubles the 128 that is then
    subtracted. For float16, the number plus 128 is unsigned. Exponent and mantissa of e4m3 become the lowest
    exponent bits and the highest mantissa bits; what stands for NaN becomes 480.
    """
    return [_of_bytes(word, odd, kind, dtype) for odd in range(2)]


def _of_bytes(word: Any, odd: int, kind: str, dtype: jnp.dtype[Any]) -> Any:
    mantissa = MANTISSA[dtype]
    if kind == "int8":
        word, power = shifted(word, 8 * odd), constant(bits_of(1 << mantissa, dtype))
        if mantissa < 8:
            low, sign = (asm(AND_OR, word, constant(bits), power) for bits in (0x7F, 0x80))
            return asm(MULTIPLY_ADD[str(dtype)], sign, constant(bits_of(-1, dtype)), low)
        bits = asm(AND_XOR, word, constant(0xFF), constant(bits_of(1 << mantissa, dtype) | 0x80))
        return multiplied(bits, bits_of(1, dtype), bits_of(-(1 << mantissa) - 128, dtype), dtype)
    up = 0 if odd else 8  # so that the byte is the upper one of its half
    magnitude = shifted(word, 11 - mantissa - up)
    magnitude = asm("and.b32 $0, $1, $2;", magnitude, constant(0x7F << mantissa - 3))
    bits = asm(AND_OR, shifted(word, -up), constant(1 << 15), magnitude)
    return multiplied(bits, bits_of(2.0 ** (BIAS[dtype] - 7), dtype), bits_of(-0.0, dtype), dtype)


def of_word(word: Any, kind: str, dtype: jnp.dtype[Any]) -> list[Any]:
    """The numbers of a word as two pairs in order, otherwise as `of_bytes`."""
    # the bytes of a pair in the upper or the lower bytes of two halves
    odd, selectors = (0, ("0x4140", "0x4342")) if kind == "int8" else (1, ("0x1404", "0x3424"))
    spread = (asm(f"prmt.b32 $0, $1, 0, {selector};", word) for selector in selectors)
    return [_of_bytes(pair, odd, kind, dtype) for pair in spread]


def words_of(register: Any) -> list[Any]:
    """The words of a register that holds a vector."""
    vector, i32 = ir.VectorType(register.type), ir.IntegerType.get_signless(32)
    size = vector.shape[0] // (mgpu.bitwidth(vector) // 32)  # elements of a word
    parts = (slice(first, first + size) for first in range(0, vector.shape[0], size))
    return [mgpu.utils.bitcast(mgpu.utils.vector_slice(register, part), i32) for part in parts]


def pair_of(word: Any, dtype: jnp.dtype[Any]) -> Any:
    """A word as a vector of two numbers."""
    return mgpu.utils.bitcast(word, ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(dtype)))
