"""cvt, against definitions in fractions."""

from __future__ import annotations

import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx_machine import scalars
from tests.ptx_machine.one_instruction import execute, floats, integers, lanes
from tests.ptx_machine.scalars import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    Format,
    Number,
    clamp,
    decode,
    encode,
    signed,
)

FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
PREFIX = {16: "%rs", 32: "%r", 64: "%rd"}
SOME = settings(max_examples=5, deadline=None)
MODES = ("rn", "rz", "rm", "rp")


def drawn(data: st.DataObject, f: Format) -> list[int]:
    return data.draw(lanes(floats(f.exponent, f.mantissa)))


def converted(op: str, values: list[int], of: int, to: int) -> list[int]:
    target = f"{PREFIX[to]}0"
    [got] = execute(f"{op} {target}, {PREFIX[of]}1", {f"{PREFIX[of]}1": values}, target)
    return got


def relu(x: Number) -> Number:
    return Number("finite") if x.negative and x.kind != "nan" else x


NARROWINGS = [("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("bf16", "f16")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("to", "of"), NARROWINGS)
@SOME
@given(data=st.data())
def test_narrower_floats_are_rounded_once(to: str, of: str, mode: str, data: st.DataObject) -> None:
    source, target = FORMATS[of], FORMATS[to]
    values = drawn(data, source)
    want = [encode(decode(x, source), target, mode) for x in values]
    assert converted(f"cvt.{mode}.{to}.{of}", values, source.bits, target.bits) == want
    if of == "f32":
        want = [encode(relu(decode(x, source)), target, mode) for x in values]
        assert converted(f"cvt.{mode}.relu.{to}.{of}", values, source.bits, target.bits) == want


@pytest.mark.parametrize(("to", "of"), [("f32", "f16"), ("f32", "bf16"), ("f64", "f32")])
@SOME
@given(data=st.data())
def test_wider_floats_are_exact(to: str, of: str, data: st.DataObject) -> None:
    source, target = FORMATS[of], FORMATS[to]
    values = [x for x in drawn(data, source)]
    if to == "f64":  # whose NaN keep their payloads
        values = [0 if decode(x, source).kind == "nan" else x for x in values]
    want = [encode(decode(x, source), target) for x in values]
    assert converted(f"cvt.{to}.{of}", values, source.bits, target.bits) == want


@SOME
@given(data=st.data())
def test_float32_to_itself(data: st.DataObject) -> None:
    values = drawn(data, F32)
    want = [encode(scalars.saturate(decode(x, F32)), F32) for x in values]
    assert converted("cvt.sat.f32.f32", values, 32, 32) == want
    wholes = {
        "rni": lambda x: Fraction(round(x)),
        "rzi": lambda x: Fraction(int(x)),
        "rmi": lambda x: Fraction(x // 1),
        "rpi": lambda x: -Fraction(-x // 1),
    }
    for mode, whole in wholes.items():
        got = converted(f"cvt.{mode}.f32.f32", values, 32, 32)
        for bits, out in zip(values, got, strict=True):
            x = decode(bits, F32)
            if x.kind == "finite":
                assert decode(out, F32) == Number("finite", abs(whole(x.value)), x.negative)
            else:
                assert out == (F32.nan if x.kind == "nan" else bits)


@pytest.mark.parametrize("to", ["f16", "bf16"])
@SOME
@given(data=st.data())
def test_pairs_have_the_first_operand_in_the_upper_half(to: str, data: st.DataObject) -> None:
    high, low = drawn(data, F32), drawn(data, F32)
    for mode in ("rn", "rz"):
        for ending, change in {"": lambda x: x, ".relu": relu}.items():
            op = f"cvt.{mode}{ending}.{to}x2.f32 %r0, %r1, %r2"
            [got] = execute(op, {"%r1": high, "%r2": low}, "%r0")
            halves = [[encode(change(decode(x, F32)), FORMATS[to], mode) for x in xs] for xs in (high, low)]
            assert got == [x << 16 | y for x, y in zip(*halves, strict=True)]


EIGHT = {"e4m3": (E4M3, ml_dtypes.float8_e4m3fn), "e5m2": (E5M2, ml_dtypes.float8_e5m2)}


def near_one(source: random.Random) -> int:
    """float32 in the range of formats of eight bits."""
    return floats(8, 23)(source) & 0x83FFFFFF | 0x3C000000


@pytest.mark.parametrize("kind", EIGHT)
@SOME
@given(data=st.data())
def test_eight_bit_floats_saturate(kind: str, data: st.DataObject) -> None:
    f, _ = EIGHT[kind]
    pairs = [drawn(data, F32), data.draw(lanes(near_one))]
    [got] = execute(
        f"cvt.rn.satfinite.{kind}x2.f32 %rs0, %r1, %r2", {"%r1": pairs[0], "%r2": pairs[1]}, "%rs0"
    )
    high, low = ([encode(decode(x, F32), f, saturated=True) for x in xs] for xs in pairs)
    assert got == [x << 8 | y for x, y in zip(high, low, strict=True)]
    halves = [drawn(data, F16), drawn(data, F16)]
    both = [x << 16 | y for x, y in zip(*halves, strict=True)]
    [got] = execute(f"cvt.rn.satfinite.{kind}x2.f16x2 %rs0, %r1", {"%r1": both}, "%rs0")
    high, low = ([encode(decode(x, F16), f, saturated=True) for x in xs] for xs in halves)
    assert got == [x << 8 | y for x, y in zip(high, low, strict=True)]


@pytest.mark.parametrize("kind", EIGHT)
def test_every_eight_bit_float_as_float16(kind: str) -> None:
    f, dtype = EIGHT[kind]
    for start in range(0, 256, 32):
        low = [*range(start, start + 32)]
        high = [x ^ 0x80 for x in low]
        [got] = execute(
            f"cvt.rn.f16x2.{kind}x2 %r0, %rs1",
            {"%rs1": [x << 8 | y for x, y in zip(high, low, strict=True)]},
            "%r0",
        )
        want = [[encode(decode(x, f), F16) for x in xs] for xs in (high, low)]
        assert got == [x << 16 | y for x, y in zip(*want, strict=True)]
        exact = np.array(low, np.uint8).view(dtype).astype(np.float64)
        mine = [float(decode(x, f).value) if decode(x, f).kind == "finite" else 0 for x in low]
        assert mine == np.where(np.isfinite(exact), exact, 0).tolist()


WHOLE = {"rni": round, "rzi": int, "rmi": lambda x: x // 1, "rpi": lambda x: -(-x // 1)}


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("of", ["f32", "f16", "f64"])
@SOME
@given(data=st.data())
def test_integers_are_clamped(to: str, of: str, data: st.DataObject) -> None:
    f, width = FORMATS[of], int(to[1:])
    some = drawn(data, f)
    exponent = min(f.bias + width, (1 << f.exponent) - 2)  # numbers near the ends of the range
    edges = data.draw(lanes(lambda source: source.randint(exponent - 3, exponent)))
    values = some[:16] + [
        x & ((1 << f.mantissa) - 1 | 1 << f.bits - 1) | e << f.mantissa
        for x, e in zip(some[16:], edges[16:], strict=True)
    ]
    register = max(width, 16)
    wide = "64" in (of[1:], to[1:])
    for mode, whole in WHOLE.items():
        got = converted(f"cvt.{mode}.{to}.{of}", values, f.bits, register)
        for bits, out in zip(values, got, strict=True):
            x = decode(bits, f)
            if x.kind == "nan":
                want = (-1 if to[0] == "s" else 1) << width - 1 if wide else 0
            else:
                number = int(whole(x.value)) if x.kind == "finite" else (-1 if x.negative else 1) << 200
                want = clamp(number, width, to[0] == "s")
            assert out == want & (1 << register) - 1, (mode, x)


@pytest.mark.parametrize("of", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@SOME
@given(data=st.data())
def test_floats_of_integers_are_rounded(of: str, data: st.DataObject) -> None:
    width = int(of[1:])
    register = max(width, 16)
    values = data.draw(lanes(integers(register)))
    near = data.draw(lanes(lambda source: source.randint(-3, 3)))  # halfway between float32
    values[16:] = [
        ((x | 1 << register - 1) >> 9 << 9) + (1 << 7 + d % 3) + d & (1 << register) - 1
        for x, d in zip(values[16:], near[16:], strict=True)
    ]
    numbers = [x & (1 << width) - 1 for x in values]
    if of[0] == "s":
        numbers = [signed(x, width) for x in numbers]
    exact = [Number("finite", Fraction(abs(x)), x < 0) for x in numbers]
    for to, f in FORMATS.items():
        for mode in MODES if width < 64 else ("rn",):
            if width < 64 or to in ("f32", "f64"):
                got = converted(f"cvt.{mode}.{to}.{of}", values, register, f.bits)
                assert got == [encode(x, f, mode) for x in exact], (to, mode)


def test_addresses() -> None:
    given = {"%rd1": [*range(1024, 1056)]}
    [generic] = execute("cvta.shared.u64 %rd0, %rd1", given, "%rd0")
    assert min(generic) > 1 << 40
    assert execute("cvta.to.shared.u64 %rd0, %rd1", {"%rd1": generic}, "%rd0") == [given["%rd1"]]
    assert execute("cvta.to.global.u64 %rd0, %rd1", given, "%rd0") == [given["%rd1"]]
