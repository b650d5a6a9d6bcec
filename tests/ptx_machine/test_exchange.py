"""Exchange among lanes, against definitions lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx_machine.kernels import output, run
from tools.ptx_machine import Array

words = st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32)
few = st.lists(st.integers(0, 3), min_size=32, max_size=32)

HEAD = """
mul.wide.u32 %d5, %r0, 4;
add.u64 %d6, %d0, %d5;
add.u64 %d7, %d1, %d5;
ld.global.u32 %r3, [%d6];
"""


def per_lane(body: str, values: list[int]) -> list[int]:
    """What a body makes of %r3 in %r4, with other lanes' help."""
    text = f"{HEAD}{body}\nst.global.u32 [%d7], %r4;"
    result = run(text, Array("in", np.array(values, np.uint32)), output(32))
    assert not result.errors
    return result.arrays["out"].tolist()


def source(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """PTX ISA, "shfl.sync"."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    low, top = lane & segment, (lane & segment) | (clamp & ~segment & 31)
    if mode == "up":
        j, inside = lane - b, lane - b >= top
    elif mode == "down":
        j, inside = lane + b, lane + b <= top
    elif mode == "bfly":
        j, inside = lane ^ b, lane ^ b <= top
    else:
        j = low | (b & ~segment & 31)
        inside = j <= top
    return (j, True) if inside else (lane, False)


@settings(deadline=None, max_examples=40)
@given(
    words,
    st.sampled_from(["up", "down", "bfly", "idx"]),
    st.integers(0, 40),
    st.sampled_from([0, 16, 24, 28, 30]),
    st.booleans(),
)
def test_shfl(values: list[int], mode: str, b: int, segment: int, constant: bool) -> None:
    c = segment << 8 | (0 if mode == "up" else 31)
    operands = f"{b}, {c}" if constant else "%r5, %r6"
    body = f"""
    mov.u32 %r5, {b};
    mov.u32 %r6, {c};
    shfl.sync.{mode}.b32 %r4|%p1, %r3, {operands}, -1;
    @!%p1 xor.b32 %r4, %r4, 1;
    """
    want = []
    for lane in range(32):
        j, inside = source(mode, lane, b, c)
        want.append(values[j] ^ (not inside))
    assert per_lane(body, values) == want


@settings(deadline=None, max_examples=20)
@given(few)
def test_vote(values: list[int]) -> None:
    body = """
    setp.gt.u32 %p1, %r3, 0;
    vote.sync.ballot.b32 %r4, %p1, -1;
    vote.sync.all.pred %p2, %p1, -1;
    vote.sync.any.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p1, -1;
    @%p2 xor.b32 %r4, %r4, 1;
    @%p3 xor.b32 %r4, %r4, 2;
    @%p4 xor.b32 %r4, %r4, 4;
    """
    true = [x > 0 for x in values]
    bits = sum(x << i for i, x in enumerate(true))
    assert (
        per_lane(body, values) == [bits ^ all(true) ^ any(true) << 1 ^ (all(true) or not any(true)) << 2] * 32
    )


def signed(x: int) -> int:
    return x - (1 << 32 if x >> 31 else 0)


@pytest.mark.parametrize(
    ("op", "scalar"),
    [
        ("add.u32", sum),
        ("min.u32", min),
        ("max.u32", max),
        ("min.s32", lambda values: min(map(signed, values))),
        ("max.s32", lambda values: max(map(signed, values))),
    ],
)
def test_redux(op: str, scalar) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 32, 32).tolist()
    assert per_lane(f"redux.sync.{op} %r4, %r3, -1;", values) == [scalar(values) % (1 << 32)] * 32


@pytest.mark.parametrize(
    ("op", "wanted"), [("max", 9.0), ("min", -30.0), ("max.abs", 30.0), ("max.NaN", np.nan), ("min.abs", 0.5)]
)
def test_redux_of_floats(op: str, wanted: float) -> None:
    values = np.full(32, 0.5, np.float32)
    values[[3, 7, 20]] = 9.0, -30.0, np.nan
    [got] = {*per_lane(f"redux.sync.{op}.f32 %r4, %r3, -1;", values.view(np.uint32).tolist())}
    assert got == (0x7FFFFFFF if np.isnan(wanted) else np.float32(wanted).view(np.uint32))


@settings(deadline=None, max_examples=20)
@given(few)
def test_match(values: list[int]) -> None:
    got = per_lane("match.any.sync.b32 %r4, %r3, -1;", values)
    assert got == [sum((x == y) << i for i, x in enumerate(values)) for y in values]


def test_activemask_and_elect() -> None:
    body = """
    mov.u32 %r4, 0;
    setp.lt.u32 %p1, %r0, 7;
    @!%p1 bra done;
    activemask.b32 %r4;
    elect.sync %r5|%p2, 0x7f;
    @%p2 add.u32 %r4, %r4, 1000;
    done:
    """
    got = per_lane(body, [0] * 32)
    assert sorted(got[:7]) == [127] * 6 + [1127]
    assert got[7:] == [0] * 25
