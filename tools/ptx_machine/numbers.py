"""Number formats: rounding, flushing, NaN, conversions (PTX ISA, "Floating-point instructions" and `cvt`).

Functions take and return arrays of any length, since a packed instruction is one on twice as many numbers.
bfloat16 is its bits in uint16; E4M3 and E5M2 are bits in uint8. A NaN result is the canonical one of its
format, except of float64. NumPy's floating-point warnings must be off.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

type Array = np.ndarray[Any, Any]

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64

BF16 = np.dtype(ml_dtypes.bfloat16)
NAN: dict[int, Any] = {2: u2(0x7FFF).view(f2), 4: u4(0x7FFFFFFF).view(f4)}
# Constants of the functions that are called most are arrays: NumPy takes them sooner than its numbers.
LOW = np.array((1 << 28) - 1, u8)
EXPONENT, SIGN = np.array(0x7F800000, u4), np.array(0x80000000, u4)
ZERO32, ONE32, ONE64 = np.array(0, f4), np.array(1, f4), np.array(1, i8)
EIGHT_BITS: dict[str, tuple[Any, float]] = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
}
WHOLE: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}

# the smallest and largest float64 in the range of each type of integers
LIMITS: dict[Any, tuple[Array, Array]] = {
    t: (np.array(np.iinfo(t).min, f8), np.array(np.iinfo(t).max, f8)) for t in (i1, i2, i4, u1, u2, u4)
}
LIMITS |= {t: (np.array(np.iinfo(t).min, f8), np.nextafter(f8(np.iinfo(t).max), 0)) for t in (i8, u8)}


def canonical(x: Array) -> Array:
    """NaN becomes the canonical NaN of float16 or float32."""
    if x.itemsize == 4:
        total = x.dot(x)  # NaN if and only if one of them is: squares have one sign
        if total == total:
            return x
    return np.where(np.isnan(x), NAN[x.itemsize], x)


def flush(x: Array) -> Array:
    """Subnormal float32 becomes zero of its sign (.ftz)."""
    bits = x.view(u4)
    exponents = bits & EXPONENT
    if np.count_nonzero(exponents) == x.size:
        return x
    return np.where(exponents, bits, bits & SIGN).view(f4)


def saturate(x: Array) -> Array:
    """Clamps to [0, 1]; NaN becomes 0 (.sat)."""
    return np.where(x > ZERO32, np.minimum(x, ONE32), ZERO32).astype(x.dtype, copy=False)


# ---- rounding


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, rounded to odd: the result can be rounded again to any narrower format as if it were
    exact (Boldo and Melquiond, 2008).
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact (Knuth's TwoSum)
    if not np.count_nonzero(error):
        return total
    below = error < 0
    bits = total.view(i8)
    odd = (bits - (below != np.signbit(total))) | ONE64  # cut off toward zero, with a sticky bit
    return np.where(below | (error > 0), odd, bits).view(f8)  # the error beside infinities is NaN


def rounded(x: Array, to: Any, mode: str = "rn") -> Array:
    """float64 or float32, to a narrower float: to nearest, ties to even (rn), toward zero (rz), minus (rm) or
    plus (rp) infinity.
    """
    near = x.astype(to)
    if mode == "rn":
        return near
    back = near.astype(x.dtype)
    if mode == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(near, to(0)), near)
    limit, wrong = (to(-np.inf), back > x) if mode == "rm" else (to(np.inf), back < x)
    return np.where(wrong, np.nextafter(near, limit), near)


def exact_sum(a: Array, b: Array, mode: str) -> Array:
    """`odd_sum`, where an exact zero has the sign that the rounding mode gives it."""
    total = odd_sum(a, b)
    if mode == "rm" and np.count_nonzero(total) < total.size:
        total = np.where((total == 0) & (np.signbit(a) != np.signbit(b)), f8(-0.0), total)
    return total


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float32, rounded once to nearest."""
    product = a.astype(f8) * b.astype(f8)  # exact: 48 bits
    addend = c.astype(f8)
    total = product + addend
    # Rounding a rounded sum differs from rounding the sum only if the former is half-way between two float32.
    # Then its last 28 bits are zero, as those of a NaN of a float32.
    if np.count_nonzero(total.view(u8) & LOW) == total.size:
        return total.astype(f4)
    return canonical(odd_sum(product, addend).astype(f4))


def fma32_directed(a: Array, b: Array, c: Array, mode: str) -> Array:
    """a * b + c in float32, rounded once by the mode."""
    return canonical(rounded(exact_sum(a.astype(f8) * b, c.astype(f8), mode), f4, mode))


# ---- conversions


def from_bf16(bits: Array) -> Array:
    return bits.view(BF16).astype(f4)


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 or float64 to the bits of bfloat16, rounded once."""
    if x.itemsize == 8:
        x = _odd32(x)
    if mode == "rn":
        out: Array = x.astype(BF16).view(u2)
        total = x.dot(x)
        return out if total == total else np.where(np.isnan(x), u2(0x7FFF), out)
    bits = x.view(u4)
    # away from zero on one side, where anything is cut off
    up = u4(0) if mode == "rz" else np.where(np.signbit(x) == (mode == "rm"), u4(0xFFFF), u4(0))
    return np.where(np.isnan(x), u2(0x7FFF), ((bits + up) >> u4(16)).astype(u2))


def packed(low: Array, high: Array) -> Array:
    """Two arrays of 16-bit numbers as one of uint32."""
    out = np.empty((low.size, 2), u2)
    out[:, 0] = low
    out[:, 1] = high
    return out.view(u4).ravel()


def _odd32(x: Array) -> Array:
    """float64 to float32, rounded to odd."""
    near = x.astype(f4)
    back = near.astype(f8)
    bits = near.view(u4) - (np.abs(back) > np.abs(x)).astype(u4)  # toward zero
    return np.where(back == x, near.view(u4), np.where(np.isnan(x), near.view(u4), bits | u4(1))).view(f4)


def to_f16(x: Array, mode: str = "rn") -> Array:
    return canonical(rounded(x, f2, mode))


def from_eight_bits(bits: Array, kind: str) -> Array:
    """E4M3 or E5M2 in uint8 to float16. Exact."""
    return canonical(bits.view(EIGHT_BITS[kind][0]).astype(f2))


def to_eight_bits(x: Array, kind: str) -> Array:
    """float32 to E4M3 or E5M2 in uint8: to nearest, and to the largest finite number beyond it."""
    dtype, largest = EIGHT_BITS[kind]
    wide = x.astype(f4)
    bits = np.clip(wide, f4(-largest), f4(largest)).astype(dtype).view(u1)
    return np.where(np.isnan(wide), u1(0x7F), bits)


def relu(x: Array) -> Array:
    """Negative numbers and -0 become +0; NaN stays."""
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0))


def to_integer(x: Array, to: Any, mode: str, wide: bool) -> Array:
    """A float to an integer: rounded by rni, rzi, rmi or rpi, clamped to the type's range.

    Args:
        wide: float64 takes part, or 64-bit integers: NaN becomes the number whose only bit is the highest,
            otherwise 0.
    """
    whole = WHOLE[mode](x.astype(f8))
    low, high = LIMITS[to]
    out = np.minimum(np.maximum(whole, low), high).astype(to)
    if to in (i8, u8):  # whose largest number float64 does not hold
        out = np.where(whole > high, to(np.iinfo(to).max), out)
    if (total := whole.dot(whole)) != total:  # one is NaN
        info = np.iinfo(to)
        nan = (info.min or 1 << info.bits - 1) if wide else 0
        out = np.where(np.isnan(whole), to(nan), out)
    return out
