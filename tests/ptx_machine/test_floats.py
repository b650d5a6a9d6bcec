"""Instructions on floats, against definitions in fractions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ptx_machine import scalars
from tests.ptx_machine.one_instruction import execute, floats, lanes
from tests.ptx_machine.scalars import (
    BF16,
    F16,
    F32,
    F64,
    Format,
    Number,
    add,
    decode,
    encode,
    multiply,
    negate,
)

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
PREFIX = {16: "%rs", 32: "%r", 64: "%rd"}
SOME = settings(max_examples=5, deadline=None)
MODES = ("rn", "rz", "rm", "rp")
Operation = Callable[..., Number]


def values_of(data: st.DataObject, f: Format, count: int) -> list[list[int]]:
    return [data.draw(lanes(floats(f.exponent, f.mantissa))) for _ in range(count)]


def computed(op: str, f: Format, values: list[list[int]]) -> list[int]:
    names = [f"{PREFIX[f.bits]}{i}" for i in range(len(values) + 1)]
    [got] = execute(f"{op} {', '.join(names)}", dict(zip(names[1:], values, strict=True)), names[0])
    return got


def fma(a: Number, b: Number, c: Number, mode: str = "rn") -> Number:
    return add(multiply(a, b), c, mode)


def result(
    f: Format, operation: Operation, given: tuple[int, ...], mode: str, ftz: bool = False, sat: bool = False
) -> int:
    numbers = [decode(scalars.flush(x) if ftz else x, f) for x in given]
    exact = operation(*numbers)
    if not sat:
        bits = encode(exact, f, mode)
    else:
        bits = encode(scalars.saturate(decode(encode(exact, f, mode), f)), f)
    return scalars.flush(bits) if ftz else bits


@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
@SOME
@given(data=st.data())
def test_float32_sums_and_products_are_rounded_once(op: str, mode: str, data: st.DataObject) -> None:
    if op == "fma" and not mode:
        return
    operations: dict[str, Operation] = {
        "add": lambda a, b: add(a, b, mode),
        "sub": lambda a, b: add(a, negate(b), mode),
        "mul": multiply,
        "fma": lambda a, b, c: fma(a, b, c, mode),
    }
    values = values_of(data, F32, 3 if op == "fma" else 2)
    for ending, how in {"": {}, ".ftz": {"ftz": True}, ".sat": {"sat": True}}.items():
        got = computed(f"{op}{'.' if mode else ''}{mode}{ending}.f32", F32, values)
        want = [result(F32, operations[op], x, mode or "rn", **how) for x in zip(*values, strict=True)]
        assert list(map(hex, got)) == list(map(hex, want))


def bits32(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def test_a_sum_that_float64_rounds_to_a_tie_is_not_rounded_twice() -> None:
    # 1 + 2^-23 + 2^-24 - 2^-70: float64 drops the last term, and the rest is halfway between two float32
    a, b, c = (1 + 2.0**-23) * 2.0**-24, 1 - 2.0**-23, 1 + 2.0**-23
    product = Fraction(a) * Fraction(b)
    assert struct.unpack("<f", struct.pack("<f", a * b + c))[0] != 1 + 2.0**-23, "the case is none"
    assert product + Fraction(c) < Fraction(1 + 2.0**-23 + 2.0**-24)
    [got] = {*computed("fma.rn.f32", F32, [[bits32(x)] * 32 for x in (a, b, c)])}
    assert got == bits32(1 + 2.0**-23)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn", "min", "max", "min.NaN", "max.NaN"])
@SOME
@given(data=st.data())
def test_16_bit_floats_alone_and_in_pairs(op: str, kind: str, data: st.DataObject) -> None:
    f = FORMATS[kind]
    operations: dict[str, Operation] = {
        "add": add,
        "sub": lambda a, b: add(a, negate(b)),
        "mul": multiply,
        "fma.rn": fma,
        **{
            f"{name}{nan}": lambda a, b, name=name, nan=nan: scalars.extreme(a, b, name == "max", bool(nan))
            for name in ("min", "max")
            for nan in ("", ".NaN")
        },
    }
    values = values_of(data, f, 3 if op.startswith("fma") else 2)
    want = [result(f, operations[op], x, "rn") for x in zip(*values, strict=True)]
    assert computed(f"{op}.{kind}", f, values) == want
    pairs = [[x | y << 16 for x, y in zip(v, reversed(v), strict=True)] for v in values]
    assert computed(f"{op}.{kind}x2", F32, pairs) == [
        x | y << 16 for x, y in zip(want, reversed(want), strict=True)
    ]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "fma"])
@SOME
@given(data=st.data())
def test_sums_of_16_bit_floats_and_a_float32(op: str, kind: str, data: st.DataObject) -> None:
    f, operations = FORMATS[kind], {"add": add, "sub": lambda a, b: add(a, negate(b)), "fma": fma}
    names = ["%rs1", "%rs2", "%r1"] if op == "fma" else ["%rs1", "%r1"]
    values = [*values_of(data, f, len(names) - 1), *values_of(data, F32, 1)]
    [got] = execute(
        f"{op}.rn.f32.{kind} %r0, {', '.join(names)}", dict(zip(names, values, strict=True)), "%r0"
    )
    want = [
        encode(operations[op](*(decode(x, f) for x in narrow), decode(wide, F32)), F32)
        for *narrow, wide in zip(*values, strict=True)
    ]
    assert list(map(hex, got)) == list(map(hex, want))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("op", ["min", "max", "min.NaN", "max.NaN"])
@SOME
@given(data=st.data())
def test_extremes_with_and_without_nan(op: str, kind: str, data: st.DataObject) -> None:
    f = FORMATS[kind]
    values = values_of(data, f, 2)
    values[0][:4], values[1][:4] = [0, 1 << f.bits - 1] * 2, [0, 0, 1 << f.bits - 1, 1 << f.bits - 1]
    if f is F64:  # PTX leaves the payload of its NaN open
        values = [[0 if decode(x, f).kind == "nan" else x for x in v] for v in values]
    got = computed(f"{op}.{kind}", f, values)
    want = [
        result(f, lambda a, b: scalars.extreme(a, b, op.startswith("max"), "NaN" in op), x, "rn")
        for x in zip(*values, strict=True)
    ]
    assert list(map(hex, got)) == list(map(hex, want))


@SOME
@given(data=st.data())
def test_division(data: st.DataObject) -> None:
    values = values_of(data, F32, 2)
    for op, ftz in {"div.rn.f32": False, "div.full.f32": False, "div.full.ftz.f32": True}.items():
        want = [result(F32, scalars.divide, x, "rn", ftz) for x in zip(*values, strict=True)]
        assert computed(op, F32, values) == want
    one = decode(bits32(1), F32)
    want = [result(F32, lambda x: scalars.divide(one, x), (x,), "rn") for x in values[0]]
    assert computed("rcp.rn.f32", F32, values[:1]) == want
    assert computed("rcp.approx.f32", F32, values[:1]) == want


def test_div_approx_gives_zero_for_very_large_divisors() -> None:
    inputs = [
        (1.0, 2.0**127),
        (-1.0, 2.0**127),
        (math.inf, 2.0**127),
        (1.0, 2.0**126),
        (1.0, math.inf),
        (6.0, 3.0),
    ]
    a, b = ([bits32(x[i]) for x in inputs] + [bits32(1)] * 26 for i in range(2))
    got = computed("div.approx.f32", F32, [a, b])[:6]
    assert got == [0, 1 << 31, F32.nan, bits32(2.0**-126), 0, bits32(2)]


@SOME
@given(data=st.data())
def test_square_roots_are_rounded_to_nearest(data: st.DataObject) -> None:
    [values] = values_of(data, F32, 1)
    for bits, got in zip(values, computed("sqrt.rn.f32", F32, [values]), strict=True):
        x = decode(bits, F32)
        if x.kind == "nan" or (x.negative and (x.size or x.kind == "infinite")):
            assert got == F32.nan
        elif x.kind == "infinite" or not x.size:
            assert got == bits
        else:  # the square lies between those of the points halfway to the neighbours
            low, here, high = (decode(got + i, F32).size for i in (-1, 0, 1))
            assert ((low + here) / 2) ** 2 <= x.size <= ((here + high) / 2) ** 2


def test_functions() -> None:
    x = [bits32(v) for v in (0.5, 1.0, 2.0, -3.0, 0.0, math.inf, -math.inf, math.nan)] * 4

    def floats_of(op: str) -> list[float]:
        return [struct.unpack("<f", struct.pack("<I", v))[0] for v in computed(op, F32, [x])[:8]]

    def close(op: str, want: list[float]) -> None:
        assert floats_of(op) == pytest.approx(want, rel=2**-23, nan_ok=True)

    nan, inf = math.nan, math.inf
    close("ex2.approx.ftz.f32", [2**0.5, 2, 4, 0.125, 1, inf, 0, nan])
    close("lg2.approx.ftz.f32", [-1, 0, 1, nan, -inf, inf, nan, nan])
    close("rsqrt.approx.f32", [2**0.5, 1, 2**-0.5, nan, inf, 0, nan, nan])
    close("sqrt.approx.f32", [2**-0.5, 1, 2**0.5, nan, 0, inf, nan, nan])
    close("tanh.approx.f32", [math.tanh(v) for v in (0.5, 1, 2, -3, 0)] + [1, -1, nan])
    close("sin.approx.f32", [math.sin(v) for v in (0.5, 1, 2, -3, 0)] + [nan, nan, nan])
    close("cos.approx.f32", [math.cos(v) for v in (0.5, 1, 2, -3, 0)] + [nan, nan, nan])
    tiny = [bits32(-130.0)] * 32  # its result is subnormal
    assert computed("ex2.approx.f32", F32, [tiny])[0] == 1 << 19
    assert computed("ex2.approx.ftz.f32", F32, [tiny])[0] == 0


@SOME
@given(data=st.data())
def test_signs(data: st.DataObject) -> None:
    [x, y] = values_of(data, F32, 2)
    assert computed("neg.f32", F32, [x]) == [v ^ 1 << 31 for v in x]
    assert computed("abs.f32", F32, [x]) == [v & ~(1 << 31) for v in x]
    assert computed("abs.ftz.f32", F32, [x]) == [scalars.flush(v) & ~(1 << 31) for v in x]
    assert computed("neg.bf16x2", F32, [x]) == [v ^ 0x80008000 for v in x]
    assert computed("abs.f16x2", F32, [x]) == [v & 0x7FFF7FFF for v in x]
    signed = [a & 1 << 31 | b & ~(1 << 31) for a, b in zip(x, y, strict=True)]
    assert computed("copysign.f32", F32, [x, y]) == signed


COMPARED = {"eq": "__eq__", "lt": "__lt__", "le": "__le__", "gt": "__gt__", "ge": "__ge__"}


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@SOME
@given(data=st.data())
def test_comparisons_with_nan_are_false_or_unordered(kind: str, data: st.DataObject) -> None:
    f = FORMATS[kind]
    x, y = values_of(data, f, 2)
    y[::3] = x[::3]
    names = f"{PREFIX[f.bits]}1", f"{PREFIX[f.bits]}2"

    def compared(name: str) -> list[bool]:
        [got] = execute(
            f"setp.{name}.{kind} %p0, {', '.join(names)}", dict(zip(names, (x, y), strict=True)), "%p0"
        )
        return got

    pairs = [(decode(a, f), decode(b, f)) for a, b in zip(x, y, strict=True)]
    ordered = ["nan" not in (a.kind, b.kind) for a, b in pairs]
    assert compared("num") == ordered
    assert compared("nan") == [not o for o in ordered]
    for name, method in [*COMPARED.items(), ("ne", "__ne__")]:
        want = [getattr(scalars.order(a)[0], method)(scalars.order(b)[0]) for a, b in pairs]
        assert compared(name) == [w and o for w, o in zip(want, ordered, strict=True)]
        assert compared(name + "u") == [w or not o for w, o in zip(want, ordered, strict=True)]


@example([0x00000001] * 32, [0x80000000] * 32)
@SOME
@given(lanes(floats(8, 23)), lanes(floats(8, 23)))
def test_comparisons_flush(x: list[int], y: list[int]) -> None:
    [got] = execute("setp.eq.ftz.f32 %p0, %r1, %r2", {"%r1": x, "%r2": y}, "%p0")
    pairs = [
        (decode(scalars.flush(a), F32), decode(scalars.flush(b), F32)) for a, b in zip(x, y, strict=True)
    ]
    assert got == [a.kind == b.kind != "nan" and scalars.order(a)[0] == scalars.order(b)[0] for a, b in pairs]
