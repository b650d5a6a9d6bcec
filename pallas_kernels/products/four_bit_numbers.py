"""Four-bit numbers in registers, times their scales, as pairs of 16-bit floats.

Four bits become the lowest bits of an exponent and the highest of a mantissa. As subnormal numbers they are
right, too, so that factors take up the unit. int4 plus 8 is not negative. A weight is rounded once, and its
scale before, as in a model with such weights; MXFP4 stays exact. With offsets in bfloat16, the number that
stands for zero is subtracted, which is exact if it is an integer; float16 rounds offsets less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic.words import (
    AND_OR,
    AND_XOR,
    BIAS,
    MANTISSA,
    asm,
    bits_of,
    constant,
    rotated,
    shifted,
)

# The unit of scaled weights. Without it, factors would be too large for their dtype.
SCALED = {"bfloat16": 2.0**64, "float16": 2.0**6}
PAIR = {"bfloat16": "bf16x2", "float16": "f16x2"}


class ScaledNumbers:
    """Makes weights of a row's numbers. Used inside `plgpu.inline_mgpu`.

    Args:
        scales: the row's scales and perhaps offsets, for each group of some inputs; float32.
    """

    def __init__(self, kind: str, dtype: jnp.dtype[Any], scales: Sequence[Sequence[Any]]) -> None:
        self._kind, self._dtype = kind, dtype
        self._groups = len(scales[0])
        # two groups each
        self._terms = [
            self._of_groups(*([of[min(n, self._groups - 1)] for n in (at, at + 1)] for of in scales))
            for at in range(0, self._groups, 2)
        ]

    def pair(self, word: Any, nibble: int, place: float) -> Any:
        """The weights of a nibble of both halves of a word, in units of SCALED; place: of their inputs among
        those of the groups, from 0 to 1.
        """
        group = int(place * self._groups)
        code, *terms = self._terms[group // 2]
        return asm(self._code(code).replace("GROUP", str(group % 2)), self._number(word, nibble), *terms)

    def _number(self, word: Any, nibble: int) -> Any:
        mantissa = MANTISSA[self._dtype]
        if self._kind == "int4":
            low = mantissa - 3
            return asm(AND_XOR, shifted(word, 4 * nibble - low), constant(0xF << low), constant(8 << low))
        if mantissa > 7:
            magnitude = asm(
                "and.b32 $0, $1, $2;", shifted(word, 4 * nibble + 1 - mantissa), constant(7 << mantissa - 1)
            )
            return asm(AND_OR, shifted(word, 4 * nibble - 12), constant(1 << 15), magnitude)
        # signs of two nibbles are moved away from magnitudes first, so that a rotation brings both to places
        signs = constant(0x88 << 4 * (nibble // 2 * 2))
        apart = asm("lop3.b32 $0, $1, $2, $3, 0xe4;", word, rotated(word, 6), signs)
        return asm("and.b32 $0, $1, $2;", rotated(apart, 4 * nibble - 12), constant(0x81C0))

    def _of_groups(self, scales: Sequence[Any], offsets: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The code that makes weights of two groups' numbers, and what it takes for both."""
        name, bias = str(self._dtype), BIAS[self._dtype]
        if self._kind == "e2m1":
            return MULTIPLIED, self._rounded(scales, 2.0**bias / SCALED[name])
        unit = 2.0 ** (bias + 2) / SCALED[name]  # int4 numbers are in units of 2^(-2 - bias)
        if not offsets:
            factors, eight = self._rounded(scales, unit), constant(bits_of(-(2.0 ** (1 - bias)), self._dtype))
            return MULTIPLIED_AND_ADDED, factors, asm(self._code(PRODUCT), factors, eight)
        of_groups = list(zip(scales, offsets, strict=True))
        if name == "float16":
            lowest = [asm("fma.rn.f32 $0, $1, 0fc1000000, $2;", *of_group) for of_group in of_groups]
            return (
                MULTIPLIED_AND_ADDED,
                self._rounded(scales, unit),
                self._rounded(lowest, 1 / SCALED[name]),
            )
        positive = [asm("add.f32 $0, $1, 0f21800000;", scale) for scale in scales]  # 0 becomes 2^-60
        zeros = [asm(ZERO, scale, offset) for scale, offset in zip(positive, offsets, strict=True)]
        return (
            SUBTRACTED_AND_MULTIPLIED,
            self._rounded(positive, unit),
            self._rounded(zeros, -(2.0 ** (-2 - bias))),
        )

    def _rounded(self, floats: Sequence[Any], factor: float) -> Any:
        """Two floats, rounded, times a power of two."""
        return asm(self._code(ROUNDED), *floats, constant(bits_of(factor, self._dtype)))

    def _code(self, code: str) -> str:
        zero, unit = (bits_of(x, self._dtype) for x in (-0.0, 1.0))
        halves = {"NOTHING": zero, "UNIT": unit}
        for name, half in halves.items():
            code = code.replace(name, f"0x{half << 16 | half:08x}")
        return code.replace("TYPE", PAIR[str(self._dtype)])


# GPUs of 8.x have no other instruction for pairs of bfloat16.
PRODUCT = """{
    .reg .b32 nothing;
    mov.b32 nothing, NOTHING;
    fma.rn.TYPE $0, $1, $2, nothing;
}"""
ROUNDED = """{
    .reg .b32 f, nothing;
    mov.b32 nothing, NOTHING;
    cvt.rn.TYPE.f32 f, $2, $1;
    fma.rn.TYPE $0, f, $3, nothing;
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
    .reg .b32 n, factor, term, nothing, unit;
    mov.b32 {{h0, h1}}, $2;
    mov.b32 factor, {{hGROUP, hGROUP}};
    mov.b32 nothing, NOTHING;
    mov.b32 unit, UNIT;
    {code}
}}"""
    for code in (
        "fma.rn.TYPE $0, $1, factor, nothing;",
        f"{TERM} fma.rn.TYPE $0, $1, factor, term;",
        f"{TERM} fma.rn.TYPE n, $1, unit, term; fma.rn.TYPE $0, n, factor, nothing;",
    )
)
