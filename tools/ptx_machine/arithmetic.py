"""Operations of one instruction on arrays of lanes: integers and floats (PTX ISA, "Instruction set").

What NumPy's operators do already is not repeated here. Integers wrap. Shift counts and positions are uint32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.ptx_machine.numbers import (
    Array,
    canonical,
    exact_sum,
    f2,
    f4,
    f8,
    from_bf16,
    i8,
    odd_sum,
    rounded,
    to_bf16,
    to_f16,
    u1,
    u2,
    u4,
    u8,
)


def merge(mask: Array, new: Array, old: Array) -> Array:
    """New values where the mask is set."""
    return np.where(mask, new, old)


# ---- bits


def shl(a: Array, count: Array) -> Array:
    """Counts beyond the width give 0."""
    bits = 8 * a.itemsize
    kind = a.dtype.type
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(kind), kind(0))


def shr(a: Array, count: Array) -> Array:
    """Counts beyond the width give 0, or the sign of signed numbers."""
    bits = 8 * a.itemsize
    kind = a.dtype.type
    moved = a >> np.minimum(count, bits - 1).astype(kind)
    return moved if a.dtype.kind == "i" else np.where(count < bits, moved, kind(0))


def funnel(low: Array, high: Array, count: Array, left: bool, wrap: bool) -> Array:
    """shf: 32 bits of high:low, shifted."""
    n = (count & u4(31) if wrap else np.minimum(count, u4(32))).astype(u8)
    both = high.astype(u8) << u8(32) | low
    return ((both << n) >> u8(32) if left else both >> n).astype(u4)


def bfe(a: Array, position: Array, length: Array) -> Array:
    """Bits of a number, extended by the highest of them if it is signed."""
    bits = 8 * a.itemsize
    at, n = (position & u4(255)).astype(i8), (length & u4(255)).astype(i8)
    field = shr(a.view(f"u{a.itemsize}"), at.astype(u4)) & _ones(n, bits)
    if a.dtype.kind == "u":
        return field
    sign = a.view(f"u{a.itemsize}") >> np.minimum(at + n - 1, bits - 1).clip(0).astype(field.dtype) & 1
    extended = field | np.where(
        (sign == 1) & (n > 0), ~_ones(np.clip(bits - at, 0, n), bits), field.dtype.type(0)
    )
    return extended.view(a.dtype)


def bfi(a: Array, b: Array, position: Array, length: Array) -> Array:
    """b, with its bits from the position on replaced by the lowest of a."""
    at, n = position & u4(255), (length & u4(255)).astype(i8)
    hole = shl(_ones(n, 8 * a.itemsize), at)
    return (shl(a, at) & hole) | (b & ~hole)


def _ones(count: Array, bits: int) -> Array:
    """Numbers whose lowest bits are set."""
    kind: Any = u4 if bits == 32 else u8
    return np.where(count >= bits, ~kind(0), (kind(1) << np.clip(count, 0, bits - 1).astype(kind)) - kind(1))


def prmt(a: Array, b: Array, selector: Array, mode: str = "") -> Array:
    """Four bytes of b:a, chosen by four numbers of four bits; their bit 3 spreads the byte's sign."""
    source = np.stack([a, b], -1).view(u1)  # [..., 8]
    if mode:
        picks = np.array(PERMUTED[mode], u4)[(selector & u4(3)).astype(np.intp)]
    else:
        picks = selector[:, None] >> FOURS & u4(15)
    out = np.take_along_axis(source, (picks & u4(7)).astype(np.intp), 1)
    signed = picks & u4(8)
    if signed.any():
        out = np.where(signed, np.where(out & u1(128), u1(255), u1(0)), out)
    return np.ascontiguousarray(out).view(u4)[:, 0]


def prmt_constant(a: Array, b: Array, picks: Array) -> Array:
    """`prmt` for a constant selector without signs: `picks` are its four numbers."""
    out = np.empty((a.size, 2), u4)
    out[:, 0] = a
    out[:, 1] = b
    return out.view(u1).take(picks, 1).view(u4).ravel()


FOURS = np.array([0, 4, 8, 12], u4)
PERMUTED = {  # byte 0 first, for each value of the selector's two bits
    "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
    "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
    "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
    "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
    "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
}


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """The bitwise function whose truth table has bit 4 a + 2 b + c."""
    clear, set = TWO[table & 15], TWO[table >> 4 & 15]
    if clear is set:
        return clear(b, c)
    if clear is TWO[0]:
        return a & set(b, c)
    if set is TWO[15]:
        return a | clear(b, c)
    return (a & set(b, c)) | (~a & clear(b, c))


# bitwise functions by their truth tables, which have bit 2 b + c
TWO: list[Any] = [
    lambda b, c: np.zeros_like(b),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c.copy(),
    lambda b, c: ~b | c,
    lambda b, c: b.copy(),
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~np.zeros_like(b),
]


def popc(a: Array) -> Array:
    return np.bitwise_count(a).astype(u4)


def clz(a: Array) -> Array:
    bits = 8 * a.itemsize
    return np.array([bits - int(x).bit_length() for x in a], u4)


def brev(a: Array) -> Array:
    bits = 8 * a.itemsize
    return np.array([int(f"{int(x):0{bits}b}"[::-1], 2) for x in a], a.dtype)


def bfind(a: Array, from_top: bool = False) -> Array:
    """Position of the highest bit that differs from the sign; all ones if there is none."""
    bits = 8 * a.itemsize
    where = [(int(x) if x >= 0 else ~int(x)).bit_length() - 1 for x in a]
    return np.array([0xFFFFFFFF if n < 0 else bits - 1 - n if from_top else n for n in where], u4)


# ---- integers


def divide(a: Array, b: Array) -> Array:
    """Toward zero. Division by zero, which PTX leaves open, gives all ones, as GPUs do."""
    zero = b == 0
    if a.dtype.kind == "u":
        return np.where(zero, ~a.dtype.type(0), a // np.where(zero, a.dtype.type(1), b))
    unsigned = f"u{a.itemsize}"
    size = np.abs(a).view(unsigned) // np.where(zero, 1, np.abs(b).view(unsigned)).astype(unsigned)
    quotient = np.where((a < 0) ^ (b < 0), -size.view(a.dtype), size.view(a.dtype))
    return np.where(zero, a.dtype.type(-1), quotient)


def remainder(a: Array, b: Array) -> Array:
    """The remainder of `divide`: with the sign of a; a itself if b is zero."""
    return a - np.where(b == 0, a.dtype.type(0), divide(a, b) * b)


def high_product(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    bits = 8 * a.itemsize
    if bits == 64:
        out = [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]
        return np.array(out, a.dtype)
    wide = np.dtype(f"{a.dtype.kind}{2 * a.itemsize}")
    return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)


def saturated_sum(a: Array, b: Array, sign: int) -> Array:
    """a + b or a - b of int32, clamped to its range (.sat)."""
    info = np.iinfo(a.dtype)
    return np.clip(a.astype(i8) + sign * b.astype(i8), info.min, info.max).astype(a.dtype)


def clamped(a: Array, to: Any) -> Array:
    """An integer of up to 64 bits in another type, clamped to its range (cvt.sat)."""
    info, own = np.iinfo(to), np.iinfo(a.dtype)
    low, high = max(info.min, own.min), min(info.max, own.max)
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(to)


# ---- floats


# unsigned numbers of a size, and their highest bit
BITS: dict[int, Any] = {n: (t, np.array(1 << 8 * n - 1, t)) for n, t in ((2, u2), (4, u4), (8, u8))}


def extreme(a: Array, b: Array, larger: bool, nan: bool) -> Array:
    """min or max of float16, float32 or float64: -0 is less than +0.

    Args:
        nan: NaN wins (.NaN). Otherwise a number does.
    """
    out: Array = np.maximum(a, b) if larger else np.minimum(a, b)
    if np.count_nonzero(out) < out.size:  # of two zeros NumPy returns any
        # a zero's sign: of both operands for max; of any for min, whose other is not negative
        bits, sign = BITS[a.itemsize]
        x, y = a.view(bits), b.view(bits)
        signs = x & y & sign if larger else (x | y) & sign
        out = np.where(out == 0, signs, out.view(bits)).view(a.dtype)
    if a.itemsize == 8 or (total := out.dot(out)) != total:
        if not nan:
            out = np.where(np.isnan(a), b, np.where(np.isnan(b), a, out))
        return out if a.itemsize == 8 else canonical(out)
    return out


def unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


def directed(op: str, a: Array, b: Array, mode: str) -> Array:
    """A sum or product of float32, rounded by the mode."""
    if op == "mul":
        wide = a.astype(f8) * b.astype(f8)
    else:
        wide = exact_sum(a.astype(f8), (-b if op == "sub" else b).astype(f8), mode)
    return canonical(rounded(wide, f4, mode))


def approx(name: str, x: Array) -> Array:
    """A function of float32: the exact value, rounded to nearest. The hardware's .approx differs by a few
    units of the last place.
    """
    return canonical(APPROXIMATED[name](x.astype(f8)).astype(f4))


APPROXIMATED: dict[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


def divide_approx(a: Array, b: Array) -> Array:
    """div.approx.f32: 0 for divisors of 2^126 and more, and NaN if the dividend is infinite."""
    large = (np.abs(b) > f4(2.0**126)) & np.isfinite(b)
    return canonical(
        np.where(large, np.where(np.isinf(a), f4(np.nan), np.copysign(f4(0), a) * np.sign(b)), a / b)
    )


# ---- floats of 16 bits; bfloat16 as bits


def half(op: str, kind: str, *given: Array) -> Array:
    """add, sub, mul, fma, min, max and others on the bits of float16 or bfloat16, in uint16.

    Sums and products of float32 are exact enough: it has more than twice their bits, plus two.
    """
    xs = [from_bf16(x) if kind == "bf16" else x.view(f2).astype(f4) for x in given]
    out = HALVES[op](*xs)
    return to_bf16(out) if kind == "bf16" else to_f16(out).view(u2)


def _half_fma(a: Array, b: Array, c: Array) -> Array:
    return odd_sum(a.astype(f8) * b, c.astype(f8))


HALVES: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _half_fma,
    "min": lambda a, b: extreme(a, b, False, False),
    "max": lambda a, b: extreme(a, b, True, False),
    "min.NaN": lambda a, b: extreme(a, b, False, True),
    "max.NaN": lambda a, b: extreme(a, b, True, True),
    "ex2": lambda x: np.exp2(x.astype(f8)),
    "tanh": lambda x: np.tanh(x.astype(f8)),
}
