"""Functions of many numbers at once, in a form that LLVM vectorizes."""

from __future__ import annotations

import numpy as np

from pallas_kernels.cpu.calls import float_of_bits, kernel

LOG2_E = np.float32(np.log2(np.e))
SMALLEST, LARGEST = np.float32(-126.0), np.float32(126.0)  # exponents of two that are normal numbers
# 2 ** f for f in (-1, 1), a polynomial fitted at Chebyshev nodes: relative error below 1e-7
C8, C7, C6, C5, C4, C3, C2, C1, C0 = (
    np.float32(c) for c in np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebinterpolate(np.exp2, 8))[::-1]
)


@kernel
def exponentials(x, less):
    """x[i] = exp(x[i] - less), in place; float32."""
    for i in range(x.size):
        power = min(max((x[i] - less) * LOG2_E, SMALLEST), LARGEST)
        whole = np.int32(power)
        f = power - np.float32(whole)
        y = C8 * f + C7
        y = y * f + C6
        y = y * f + C5
        y = y * f + C4
        y = y * f + C3
        y = y * f + C2
        y = y * f + C1
        y = y * f + C0
        x[i] = y * float_of_bits((whole + np.int32(127)) << np.int32(23))
