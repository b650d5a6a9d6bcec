"""Arithmetic of one number, defined by Python's integers and fractions: what the machine is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    """A binary floating-point format. top: the largest finite number, where not all exponents below the
    highest end it; nan: the canonical one's bits.
    """

    exponent: int
    mantissa: int
    nan: int
    infinite: bool = True

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def largest(self) -> int:
        """Bits of the largest finite number."""
        return self.infinity - 1 if self.infinite else (1 << self.bits - 1) - 2


F16, BF16, F32 = Format(5, 10, 0x7FFF), Format(8, 7, 0x7FFF), Format(8, 23, 0x7FFFFFFF)
F64, E4M3, E5M2 = Format(11, 52, 0x7FF8 << 48), Format(4, 3, 0x7F, infinite=False), Format(5, 2, 0x7F)


@dataclass(frozen=True)
class Number:
    """kind: finite, infinite or nan. A zero has a sign."""

    kind: str
    size: Fraction = Fraction(0)
    negative: bool = False

    @property
    def value(self) -> Fraction:
        return -self.size if self.negative else self.size


NAN = Number("nan")


def decode(bits: int, f: Format) -> Number:
    negative, rest = bool(bits >> f.bits - 1), bits & (1 << f.bits - 1) - 1
    if f.infinite and rest >= f.infinity:
        return Number("infinite", negative=negative) if rest == f.infinity else NAN
    if not f.infinite and rest > f.largest:
        return NAN
    exponent, mantissa = rest >> f.mantissa, rest & (1 << f.mantissa) - 1
    if exponent:
        mantissa += 1 << f.mantissa
    power = max(exponent, 1) - f.bias - f.mantissa
    return Number("finite", mantissa * Fraction(2) ** power, negative)


def encode(x: Number, f: Format, mode: str = "rn", saturated: bool = False) -> int:
    """Rounds once. saturated: numbers that are too large become the largest finite one."""
    sign = x.negative << f.bits - 1
    if x.kind == "nan":
        return f.nan
    if x.kind == "infinite":
        return sign | (f.largest if saturated else f.infinity)
    if not x.size:
        return sign
    # the quantum: of the binade of the number, at least of the subnormals
    power = x.size.numerator.bit_length() - x.size.denominator.bit_length()
    if Fraction(2) ** power > x.size:
        power -= 1
    quantum = Fraction(2) ** max(power - f.mantissa, 1 - f.bias - f.mantissa)
    whole, rest = divmod(x.size, quantum)
    up = {
        "rn": rest * 2 > quantum or (rest * 2 == quantum and whole % 2 == 1),
        "rz": False,
        "rm": x.negative and rest > 0,
        "rp": not x.negative and rest > 0,
    }[mode]
    rounded = (whole + up) * quantum
    largest = decode(f.largest, f).size
    if rounded > largest:
        toward = saturated or mode == "rz" or mode == ("rp" if x.negative else "rm")
        return sign | (f.largest if toward else f.infinity)
    # bits of a number that is exact
    smallest = Fraction(2) ** (1 - f.bias)
    if rounded < smallest:
        return sign | int(rounded / (smallest / 2**f.mantissa))
    power = rounded.numerator.bit_length() - rounded.denominator.bit_length()
    mantissa = int(rounded / Fraction(2) ** power * 2**f.mantissa)
    if mantissa >= 1 << f.mantissa + 1 or mantissa < 1 << f.mantissa:
        power -= 1
        mantissa = int(rounded / Fraction(2) ** power * 2**f.mantissa)
    return sign | (power + f.bias) << f.mantissa | (mantissa - (1 << f.mantissa))


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    if "nan" in (a.kind, b.kind):
        return NAN
    if "infinite" in (a.kind, b.kind):
        if a.kind == b.kind and a.negative != b.negative:
            return NAN
        return a if a.kind == "infinite" else b
    total = a.value + b.value
    if total:
        return Number("finite", abs(total), total < 0)
    return Number("finite", negative=a.negative if a.negative == b.negative else mode == "rm")


def multiply(a: Number, b: Number) -> Number:
    negative = a.negative != b.negative
    if "nan" in (a.kind, b.kind):
        return NAN
    if "infinite" in (a.kind, b.kind):
        zero = any(x.kind == "finite" and not x.size for x in (a, b))
        return NAN if zero else Number("infinite", negative=negative)
    return Number("finite", a.size * b.size, negative)


def divide(a: Number, b: Number) -> Number:
    negative = a.negative != b.negative
    zeros = [x.kind == "finite" and not x.size for x in (a, b)]
    if "nan" in (a.kind, b.kind) or all(zeros) or a.kind == b.kind == "infinite":
        return NAN
    if zeros[1] or a.kind == "infinite":
        return Number("infinite", negative=negative)
    return Number("finite", Fraction(0) if b.kind == "infinite" else a.size / b.size, negative)


def negate(x: Number) -> Number:
    return Number(x.kind, x.size, not x.negative)


def order(x: Number) -> tuple[Fraction, bool]:
    """A key by which numbers can be compared; -0 is less than +0."""
    far = Fraction(10) ** 400
    size = far if x.kind == "infinite" else x.size
    return (-size if x.negative else size, not x.negative)


def extreme(a: Number, b: Number, larger: bool, nan: bool) -> Number:
    if "nan" in (a.kind, b.kind):
        if nan or a.kind == b.kind:
            return NAN
        return b if a.kind == "nan" else a
    return (max if larger else min)(a, b, key=order)


def flush(bits: int, f: Format = F32) -> int:
    """Subnormal bits become zero."""
    return bits if bits & f.infinity else bits & 1 << f.bits - 1


def saturate(x: Number) -> Number:
    if x.kind == "nan" or x.negative:
        return Number("finite")
    return Number("finite", Fraction(1)) if x.kind == "infinite" or x.size > 1 else x


def signed(bits: int, width: int) -> int:
    return bits - (bits >> width - 1 << width)


def clamp(x: int, width: int, sign: bool) -> int:
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if sign else (0, (1 << width) - 1)
    return min(max(x, low), high)
