"""Elementary functions of vectors."""

from __future__ import annotations

import numpy as np

from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.types import BF16, F32, I16, I32, vector
from pallas_kernels.llvm.values import Value

LARGEST_POWER = 126.0  # of two


LOG2_E = float(np.log2(np.e))
ROUNDING = 1.5 * 2.0**23  # float32 numbers of about this size have no fractional digits
# 2 ** f for f in (-1/2, 1/2), by degree, highest power first: 1 + f * (a polynomial fitted at Chebyshev
# nodes), so 2 ** 0 is 1


def _powers(degree: int) -> list[float]:
    """(2 ** f - 1) / f for f in (-1/2, 1/2), as a polynomial of one degree less."""
    nodes = np.polynomial.chebyshev.chebpts1(degree) / 2
    return [
        float(c)
        for c in np.polynomial.polynomial.polyfit(nodes, np.expm1(nodes * np.log(2)) / nodes, degree - 1)[
            ::-1
        ]
    ]


POWERS = {degree: (*_powers(degree), 1.0) for degree in (4, 6)}  # relative errors of 7e-6 and 1e-8


def power_of_two(code: Code, x: Value, degree: int = 6) -> Value:
    """2 ** x for x up to LARGEST_POWER, 0 for x <= -127; float32."""
    x = x.most(-127.0)  # the bits of its exponent are those of 0
    shifted = x + ROUNDING  # the last bits are x, rounded
    f = x - (shifted - ROUNDING)
    first, *others = POWERS[degree]
    y = code.constant(x.kind, first)
    for c in others:
        y = code.fma(y, f, code.constant(x.kind, c))
    kind = I32 if x.kind == F32 else vector(I32, x.kind.count)
    return (y.bits(kind) + (shifted.bits(kind) << 23)).bits(x.kind)


def rounded(code: Code, real: Value, pairs: bool) -> Value:
    """Rounds 16 float32 to bfloat16, to nearest even, as int16."""
    if pairs:  # a processor with products of pairs has the conversion too
        return real.to(vector(BF16)).bits(vector(I16))
    bits = real.bits(vector(I32))
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).to(vector(I16))
