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


def both(half: int) -> Any:
    """A word with this number in both halves."""
    return np.uint32(half << 16 | half).astype(np.int32)


def constant(half: int) -> Any:
    """`both` in a register."""
    return mgpu.c(int(both(half)), ir.IntegerType.get_signless(32))


def bits_of(number: float, dtype: jnp.dtype[Any]) -> int:
    """The bits of a 16-bit float."""
    return int(np.asarray(number, dtype).view(np.uint16))
