"""Instructions on integers and bits, against definitions in Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx_machine.one_instruction import PREFIX, execute, integers, lanes
from tests.ptx_machine.scalars import clamp, signed

Scalar = Callable[..., int]


def s(x: int, width: int = 32) -> int:
    return signed(x, width)


def quotient(a: int, b: int) -> int:
    size = abs(a) // abs(b) if b else 0
    return -1 if b == 0 else -size if (a < 0) != (b < 0) else size


def extracted(a: int, at: int, n: int, width: int, sign: bool) -> int:
    """The definition of bfe, bit by bit."""
    at, n = at & 255, n & 255
    fill = a >> min(at + n - 1, width - 1) & 1 if sign and n else 0
    bits = [a >> at + i & 1 if i < n and at + i < width else fill for i in range(width)]
    return sum(bit << i for i, bit in enumerate(bits))


def inserted(a: int, b: int, at: int, n: int, width: int) -> int:
    at, n = at & 255, n & 255
    for i in range(n):
        if at + i < width:
            b = b & ~(1 << at + i) | (a >> i & 1) << at + i
    return b


def permuted(a: int, b: int, selector: int) -> int:
    out, source = 0, (b << 32 | a).to_bytes(8, "little")
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = source[pick & 7]
        out |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * i
    return out


def looked_up(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


def pairs(scalar: Scalar, a: int, b: int) -> int:
    """A function of both halves."""
    low, high = (scalar(a >> n & 0xFFFF, b >> n & 0xFFFF) & 0xFFFF for n in (0, 16))
    return low | high << 16


B16, B32, B64 = (f"b{n}" for n in (16, 32, 64))
# instruction: kinds of result and operands, definition; results are cut to their width
CASES: dict[str, tuple[tuple[str, ...], Scalar]] = {
    "and.b32": ((B32,) * 3, lambda a, b: a & b),
    "or.b16": ((B16,) * 3, lambda a, b: a | b),
    "xor.b64": ((B64,) * 3, lambda a, b: a ^ b),
    "not.b32": ((B32,) * 2, lambda a: ~a),
    "cnot.b32": ((B32,) * 2, lambda a: a == 0),
    "add.s16": ((B16,) * 3, lambda a, b: a + b),
    "add.s32": ((B32,) * 3, lambda a, b: a + b),
    "add.s64": ((B64,) * 3, lambda a, b: a + b),
    "sub.s64": ((B64,) * 3, lambda a, b: a - b),
    "add.sat.s32": ((B32,) * 3, lambda a, b: clamp(s(a) + s(b), 32, True)),
    "sub.sat.s32": ((B32,) * 3, lambda a, b: clamp(s(a) - s(b), 32, True)),
    "mul.lo.s16": ((B16,) * 3, lambda a, b: a * b),
    "mul.lo.s32": ((B32,) * 3, lambda a, b: a * b),
    "mul.lo.s64": ((B64,) * 3, lambda a, b: a * b),
    "mul.hi.s16": ((B16,) * 3, lambda a, b: s(a, 16) * s(b, 16) >> 16),
    "mul.hi.s32": ((B32,) * 3, lambda a, b: s(a) * s(b) >> 32),
    "mul.hi.u32": ((B32,) * 3, lambda a, b: a * b >> 32),
    "mul.hi.s64": ((B64,) * 3, lambda a, b: s(a, 64) * s(b, 64) >> 64),
    "mul.hi.u64": ((B64,) * 3, lambda a, b: a * b >> 64),
    "mul.wide.u16": ((B32, B16, B16), lambda a, b: a * b),
    "mul.wide.s16": ((B32, B16, B16), lambda a, b: s(a, 16) * s(b, 16)),
    "mul.wide.u32": ((B64, B32, B32), lambda a, b: a * b),
    "mul.wide.s32": ((B64, B32, B32), lambda a, b: s(a) * s(b)),
    "mad.lo.s32": ((B32,) * 4, lambda a, b, c: a * b + c),
    "mad.lo.s64": ((B64,) * 4, lambda a, b, c: a * b + c),
    "mad.hi.s32": ((B32,) * 4, lambda a, b, c: (s(a) * s(b) >> 32) + c),
    "mad.hi.u32": ((B32,) * 4, lambda a, b, c: (a * b >> 32) + c),
    "mad.wide.s32": ((B64, B32, B32, B64), lambda a, b, c: s(a) * s(b) + c),
    "mad.wide.u32": ((B64, B32, B32, B64), lambda a, b, c: a * b + c),
    "div.s32": ((B32,) * 3, lambda a, b: quotient(s(a), s(b))),
    "div.u32": ((B32,) * 3, lambda a, b: a // b if b else -1),
    "div.s64": ((B64,) * 3, lambda a, b: quotient(s(a, 64), s(b, 64))),
    "div.u64": ((B64,) * 3, lambda a, b: a // b if b else -1),
    "rem.s32": ((B32,) * 3, lambda a, b: s(a) - quotient(s(a), s(b)) * s(b)),
    "rem.u32": ((B32,) * 3, lambda a, b: a % b if b else a),
    "rem.s64": ((B64,) * 3, lambda a, b: s(a, 64) - quotient(s(a, 64), s(b, 64)) * s(b, 64)),
    "add.u16x2": ((B32,) * 3, lambda a, b: pairs(int.__add__, a, b)),
    "sub.s16x2": ((B32,) * 3, lambda a, b: pairs(int.__sub__, a, b)),
    "min.s16x2": ((B32,) * 3, lambda a, b: pairs(lambda x, y: min(s(x, 16), s(y, 16)), a, b)),
    "max.u16x2": ((B32,) * 3, lambda a, b: pairs(max, a, b)),
    "min.s32": ((B32,) * 3, lambda a, b: min(s(a), s(b))),
    "min.relu.s32": ((B32,) * 3, lambda a, b: max(min(s(a), s(b)), 0)),
    "max.s32": ((B32,) * 3, lambda a, b: max(s(a), s(b))),
    "min.u64": ((B64,) * 3, min),
    "max.u32": ((B32,) * 3, max),
    "neg.s32": ((B32,) * 2, lambda a: -a),
    "abs.s32": ((B32,) * 2, lambda a: abs(s(a))),
    "abs.s64": ((B64,) * 2, lambda a: abs(s(a, 64))),
    "shl.b16": ((B16, B16, B32), lambda a, n: a << min(n, 16)),
    "shl.b32": ((B32,) * 3, lambda a, n: a << min(n, 32)),
    "shl.b64": ((B64, B64, B32), lambda a, n: a << min(n, 64)),
    "shr.u16": ((B16, B16, B32), lambda a, n: a >> min(n, 16)),
    "shr.s16": ((B16, B16, B32), lambda a, n: s(a, 16) >> min(n, 16)),
    "shr.u32": ((B32,) * 3, lambda a, n: a >> min(n, 32)),
    "shr.b32": ((B32,) * 3, lambda a, n: a >> min(n, 32)),
    "shr.s32": ((B32,) * 3, lambda a, n: s(a) >> min(n, 32)),
    "shr.u64": ((B64, B64, B32), lambda a, n: a >> min(n, 64)),
    "shr.s64": ((B64, B64, B32), lambda a, n: s(a, 64) >> min(n, 64)),
    "shf.l.wrap.b32": ((B32,) * 4, lambda a, b, n: (b << 32 | a) << (n & 31) >> 32),
    "shf.r.wrap.b32": ((B32,) * 4, lambda a, b, n: (b << 32 | a) >> (n & 31)),
    "shf.l.clamp.b32": ((B32,) * 4, lambda a, b, n: (b << 32 | a) << min(n, 32) >> 32),
    "shf.r.clamp.b32": ((B32,) * 4, lambda a, b, n: (b << 32 | a) >> min(n, 32)),
    "bfe.u32": ((B32,) * 4, lambda a, at, n: extracted(a, at, n, 32, False)),
    "bfe.s32": ((B32,) * 4, lambda a, at, n: extracted(a, at, n, 32, True)),
    "bfe.u64": ((B64, B64, B32, B32), lambda a, at, n: extracted(a, at, n, 64, False)),
    "bfe.s64": ((B64, B64, B32, B32), lambda a, at, n: extracted(a, at, n, 64, True)),
    "bfi.b32": ((B32,) * 5, lambda a, b, at, n: inserted(a, b, at, n, 32)),
    "bfi.b64": ((B64, B64, B64, B32, B32), lambda a, b, at, n: inserted(a, b, at, n, 64)),
    "prmt.b32": ((B32,) * 4, permuted),
    "popc.b32": ((B32,) * 2, int.bit_count),
    "popc.b64": ((B32, B64), int.bit_count),
    "clz.b32": ((B32,) * 2, lambda a: 32 - a.bit_length()),
    "clz.b64": ((B32, B64), lambda a: 64 - a.bit_length()),
    "brev.b32": ((B32,) * 2, lambda a: sum((a >> i & 1) << 31 - i for i in range(32))),
    "bfind.u32": ((B32,) * 2, lambda a: a.bit_length() - 1),
    "bfind.s32": ((B32,) * 2, lambda a: (~s(a) if s(a) < 0 else a).bit_length() - 1),
    "bfind.shiftamt.u32": ((B32,) * 2, lambda a: 32 - a.bit_length() if a else -1),
    "cvt.s64.s32": ((B64, B32), lambda a: s(a)),
    "cvt.u64.u32": ((B64, B32), lambda a: a),
    "cvt.u32.u64": ((B32, B64), lambda a: a),
    "cvt.s32.s8": ((B32, B32), lambda a: s(a & 255, 8)),
    "cvt.s32.s8 from 16 bits": ((B32, B16), lambda a: s(a & 255, 8)),
    "cvt.u16.u8": ((B16, B32), lambda a: a & 255),
    "cvt.s8.s32": ((B32, B32), lambda a: s(a & 255, 8)),
    "cvt.u8.u32": ((B16, B32), lambda a: a & 255),
    "cvt.sat.s8.s32": ((B32, B32), lambda a: clamp(s(a), 8, True)),
    "cvt.sat.u8.s32": ((B32, B32), lambda a: clamp(s(a), 8, False)),
    "cvt.sat.s32.u32": ((B32, B32), lambda a: clamp(a, 32, True)),
    "cvt.sat.u32.s64": ((B32, B64), lambda a: clamp(s(a, 64), 32, False)),
}
for table in (0x6A, 0xC0, 0xF0, 0x0F, 0x00, 0xFF, 0xEA, 0x3C, 0x96, 0xD8):
    CASES[f"lop3.b32 {table}"] = (B32,) * 4, lambda a, b, c, t=table: looked_up(a, b, c, t)


def check(op: str, data: st.DataObject) -> None:
    (result, *kinds), scalar = CASES[op]
    names = [f"{PREFIX[kind]}{i}" for i, kind in enumerate(kinds, 1)]
    values = [data.draw(lanes(integers(int(kind[1:])))) for kind in kinds]
    target, immediate = f"{PREFIX[result]}0", op.split()[1:]
    extra = f", {immediate[0]}" if op.startswith("lop3") else ""
    [got] = execute(
        f"{op.split()[0]} {target}, {', '.join(names)}{extra}", dict(zip(names, values, strict=True)), target
    )
    cut = (1 << int(result[1:])) - 1
    want = [scalar(*lane) & cut for lane in zip(*values, strict=True)]
    assert got == want


@pytest.mark.parametrize("op", CASES)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_an_instruction_on_integers_agrees_with_its_definition(op: str, data: st.DataObject) -> None:
    check(op, data)


@pytest.mark.parametrize("count", [0, 1, 31])
@settings(max_examples=5, deadline=None)
@given(values=lanes(integers(32)))
def test_shifts_by_constants(count: int, values: list[int]) -> None:
    for op, scalar in {"shr.s32": lambda a: s(a) >> count, "shl.b32": lambda a: a << count}.items():
        [got] = execute(f"{op} %r0, %r1, {count}", {"%r1": values}, "%r0")
        assert got == [scalar(x) & 0xFFFFFFFF for x in values]
    [got] = execute("shr.s32 %r0, %r1, 40", {"%r1": values}, "%r0")
    assert got == [s(x) >> 31 & 0xFFFFFFFF for x in values]


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0x3210, 0x9180, 0x4340, 16704, 17218])
@settings(max_examples=5, deadline=None)
@given(a=lanes(integers(32)), b=lanes(integers(32)))
def test_prmt_with_a_constant_selector(selector: int, a: list[int], b: list[int]) -> None:
    [got] = execute(f"prmt.b32 %r0, %r1, %r2, {selector:#x}U", {"%r1": a, "%r2": b}, "%r0")
    assert got == [permuted(x, y, selector) for x, y in zip(a, b, strict=True)]


MODES = {  # PTX ISA, prmt: which bytes (from byte 3 to byte 0) each selector takes
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}


@pytest.mark.parametrize("mode", MODES)
def test_prmt_modes(mode: str) -> None:
    a, b = [0x44332211] * 32, [0x88776655] * 32
    selectors = [i % 8 for i in range(32)]
    [got] = execute(f"prmt.b32.{mode} %r0, %r1, %r2, %r3", {"%r1": a, "%r2": b, "%r3": selectors}, "%r0")
    assert got == [permuted(a[0], b[0], int(MODES[mode][x & 3], 16)) for x in selectors]


@settings(max_examples=5, deadline=None)
@given(wide=lanes(integers(64)))
def test_mov_packs_and_unpacks(wide: list[int]) -> None:
    low, high = execute("mov.b64 {%r1, %r2}, %rd1", {"%rd1": wide}, "%r1", "%r2")
    assert (low, high) == ([x & 0xFFFFFFFF for x in wide], [x >> 32 for x in wide])
    [high] = execute("mov.b64 {_, %r2}, %rd1", {"%rd1": wide}, "%r2")
    assert high == [x >> 32 for x in wide]
    assert execute("mov.b64 %rd0, {%r1, %r2}", {"%r1": low, "%r2": high}, "%rd0") == [wide]
    parts = [[x >> 16 * i & 0xFFFF for x in wide] for i in range(4)]
    given = {f"%rs{i}": part for i, part in enumerate(parts)}
    assert execute("mov.b64 %rd0, {%rs0, %rs1, %rs2, %rs3}", given, "%rd0") == [wide]
    assert execute("mov.b32 %r0, {%rs0, %rs1}", given, "%r0") == [low]
    assert execute("mov.b64 {%rs4, %rs5, %rs6, %rs7}, %rd1", {"%rd1": wide}, "%rs5", "%rs7") == parts[1::2]
    assert execute("mov.b32 {%rs4, %rs5}, %r1", {"%r1": low}, "%rs4", "%rs5") == parts[:2]


@settings(max_examples=10, deadline=None)
@given(a=lanes(integers(32)), b=lanes(integers(32)), p=st.lists(st.booleans(), min_size=32, max_size=32))
def test_comparisons_and_selections(a: list[int], b: list[int], p: list[bool]) -> None:
    given = {"%r1": a, "%r2": b, "%p1": p}
    tests = {
        "eq": int.__eq__,
        "ne": int.__ne__,
        "lt": int.__lt__,
        "le": int.__le__,
        "gt": int.__gt__,
        "ge": int.__ge__,
    }
    for name, test in tests.items():
        [got] = execute(f"setp.{name}.s32 %p0, %r1, %r2", given, "%p0")
        assert got == [test(s(x), s(y)) for x, y in zip(a, b, strict=True)]
        [got] = execute(f"setp.{name}.u32 %p0, %r1, %r2", given, "%p0")
        assert got == [test(x, y) for x, y in zip(a, b, strict=True)]
    for name, sign in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
        [got] = execute(f"setp.{name}.u32 %p0, %r1, %r2", given, "%p0")
        assert got == [tests[sign](x, y) for x, y in zip(a, b, strict=True)]
    less = [x < y for x, y in zip(a, b, strict=True)]
    both = execute("setp.lt.and.u32 %p2|%p3, %r1, %r2, %p1", given, "%p2", "%p3")
    assert both == [
        [x and q for x, q in zip(less, p, strict=True)],
        [not x and q for x, q in zip(less, p, strict=True)],
    ]
    [got] = execute("setp.lt.or.u32 %p2, %r1, %r2, !%p1", given, "%p2")
    assert got == [x or not q for x, q in zip(less, p, strict=True)]
    [got] = execute("setp.lt.xor.u32 %p2, %r1, %r2, %p1", given, "%p2")
    assert got == [x != q for x, q in zip(less, p, strict=True)]
    [got] = execute("selp.b32 %r0, %r1, %r2, %p1", given, "%r0")
    assert got == [x if q else y for x, y, q in zip(a, b, p, strict=True)]
    for op, both in {
        "and": [x and q for x, q in zip(less, p, strict=True)],
        "not": [not q for q in p],
    }.items():
        text = "%p0, %p1" if op == "not" else "%p0, %p1, %p2"
        assert execute(f"{op}.pred {text}", given | {"%p2": less}, "%p0") == [both]
