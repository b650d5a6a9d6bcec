"""Barriers of a block: named ones, and mbarriers."""

from __future__ import annotations

import numpy as np

from tests.ptx_machine.kernels import output, run, swapped, without
from tools.ptx_machine import ORDERS, Schedule

# 4 warps add up their numbers: warp 0 reads what the others wrote.
REDUCE = """
shl.b32 %r3, %r0, 2;
mov.u32 %r4, memory;
add.u32 %r5, %r4, %r3;
st.shared.u32 [%r5], %r0;
setp.ge.u32 %p0, %r0, 32;
@%p0 bra send;
bar.sync 3, 128;
ld.shared.u32 %r6, [%r5];
ld.shared.u32 %r7, [%r5+128];
ld.shared.u32 %r8, [%r5+256];
ld.shared.u32 %r9, [%r5+384];
add.u32 %r6, %r6, %r7;
add.u32 %r6, %r6, %r8;
add.u32 %r6, %r6, %r9;
cvt.u64.u32 %d5, %r3;
add.u64 %d6, %d0, %d5;
st.global.u32 [%d6], %r6;
bra done;
send:
bar.arrive 3, 128;
done:
"""


def test_named_barrier() -> None:
    for seed, order in enumerate(ORDERS):
        result = run(REDUCE, output(32), threads=128, schedule=Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], 4 * np.arange(32) + 192)


def test_named_barrier_with_a_fault() -> None:
    for seed in range(4):
        schedule = Schedule(seed, ORDERS[seed])
        result = run(without(REDUCE, "bar.sync 3"), output(32), threads=128, schedule=schedule)
        assert {x.kind for x in result.errors} <= {"race", "uninitialised"}
        assert result.errors
        result = run(without(REDUCE, "bar.arrive 3"), output(32), threads=128, schedule=schedule)
        assert "deadlock" in result.findings[-1].message
        assert "barrier 3 (32 of 128 threads)" in result.findings[-1].message
        assert "kernel.py:7" in result.findings[-1].message
        result = run(swapped(REDUCE, "bar.arrive 3, 128", "bar.arrive 3, 96"), output(32), threads=128)
        assert "deadlock" in result.findings[-1].message or "expects 128" in result.findings[-1].message
        result = run(swapped(REDUCE, "bar.arrive 3, 128", "bar.arrive 2, 128"), output(32), threads=128)
        assert "deadlock" in result.findings[-1].message


def test_every_single_barrier_that_orders_something_is_missed() -> None:
    """Two rounds over one buffer: each of the barriers is needed, and each is reported if it is missing."""
    rounds = "\n".join(
        f"""
        st.shared.u32 [%r5], %r{10 + i};
        bar.sync 0;
        ld.shared.u32 %r{11 + i}, [%r6];
        bar.sync 1;
        """
        for i in range(3)
    )
    body = f"""
    mov.u32 %r10, %r0;
    shl.b32 %r3, %r0, 2;
    mov.u32 %r4, memory;
    add.u32 %r5, %r4, %r3;
    xor.b32 %r6, %r5, 128;
    {rounds}
    cvt.u64.u32 %d5, %r3;
    add.u64 %d6, %d0, %d5;
    st.global.u32 [%d6], %r13;
    """
    lines = [x.strip() for x in body.splitlines() if x.strip()]
    barriers = [i for i, x in enumerate(lines) if x.startswith("bar.sync")]
    assert not run("\n".join(lines), output(64), threads=64).findings
    for i in barriers[:-1]:  # the last one orders nothing
        changed = [x if n != i else "griddepcontrol.wait;" for n, x in enumerate(lines)]
        for seed in range(3):
            result = run("\n".join(changed), output(64), threads=64, schedule=Schedule(seed))
            assert "race" in {x.kind for x in result.errors}, lines[i]


def test_reductions_of_barriers() -> None:
    body = """
    and.b32 %r3, %r0, 3;
    setp.eq.u32 %p0, %r3, 0;
    bar.red.popc.u32 %r4, 0, %p0;
    bar.red.and.pred %p1, 0, %p0;
    bar.red.or.pred %p2, 0, %p0;
    selp.u32 %r5, 100, 0, %p1;
    selp.u32 %r6, 1000, 0, %p2;
    add.u32 %r4, %r4, %r5;
    add.u32 %r4, %r4, %r6;
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d6, %d0, %d5;
    st.global.u32 [%d6], %r4;
    """
    result = run(body, output(64), threads=64)
    assert not result.errors
    assert (result.arrays["out"] == 1016).all()


def test_barriers_of_diverged_lanes() -> None:
    """barrier.sync, not aligned: lanes of a warp come to it in different places."""
    body = """
    shl.b32 %r3, %r0, 2;
    mov.u32 %r4, memory;
    add.u32 %r5, %r4, %r3;
    xor.b32 %r6, %r5, 64;
    st.shared.u32 [%r5], %r0;
    setp.lt.u32 %p0, %r0, 16;
    @%p0 bra low;
    barrier.cta.sync 1, 32;
    bra both;
    low:
    barrier.cta.sync 1, 32;
    both:
    ld.shared.u32 %r7, [%r6];
    """
    assert not run(body).errors
    assert "deadlock" in run(without(body, "barrier.cta.sync")).findings[-1].message
    aligned = run(body.replace("barrier.cta.sync", "bar.sync"))
    assert "the other lanes of its warp" in aligned.findings[-1].message


def test_lanes_wait_for_different_mbarriers() -> None:
    body = """
    shl.b32 %r3, %r1, 3;
    mov.u32 %r4, memory;
    add.u32 %r4, %r4, %r3;
    setp.lt.u32 %p0, %r0, 32;
    @%p0 mbarrier.init.shared.b64 [%r4], 1;
    bar.sync 0;
    @%p0 bra look;
    st.shared.u32 [%r4+512], %r0;
    mbarrier.arrive.shared.b64 _, [%r4];
    bra done;
    look:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0;
    @!%p3 bra look;
    ld.shared.u32 %r5, [%r4+512];
    done:
    """
    for seed, order in enumerate(ORDERS):
        assert not run(body, threads=64, schedule=Schedule(seed, order)).findings
    wrong = swapped(body, "ld.shared.u32 %r5, [%r4+512];", "ld.shared.u32 %r5, [memory+512];")
    assert "race" in {x.kind for x in run(wrong, threads=64).errors}


def test_bytes_of_an_mbarrier_are_its_own() -> None:
    body = """
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [memory], 1;
    @%p0 st.shared.u32 [memory+4], %r0;
    """
    assert [x.kind for x in run(body).errors] == ["barrier"]
    assert not run(swapped(body, "[memory+4]", "[memory+8]")).errors


def test_many_mbarriers() -> None:
    """More than a run expects at first."""
    lines = ["setp.eq.u32 %p0, %r0, 0;"]
    for at in range(0, 560, 8):
        lines += [f"@%p0 mbarrier.init.shared.b64 [memory+{at}], 1;"]
        lines += [f"@%p0 mbarrier.arrive.shared.b64 _, [memory+{at}];"]
    assert run("\n".join(lines)).finished


def test_a_lane_that_waits_for_its_warp() -> None:
    """What one lane knows, others do not."""
    body = """
    setp.ge.u32 %p1, %r0, 32;
    mov.u32 %r4, memory;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [memory], 32;
    bar.sync 0;
    @!%p1 bra look;
    st.shared.u32 [%r4+64], %r4;
    mbarrier.arrive.shared.b64 _, [memory];
    bra done;
    look:
    @!%p0 bra together;
    wait:
    mbarrier.try_wait.parity.shared.b64 %p3, [memory], 0;
    @!%p3 bra wait;
    together:
    bar.warp.sync -1;
    ld.shared.u32 %r5, [%r4+64];
    done:
    """
    for seed, order in enumerate(ORDERS):
        assert not run(body, threads=64, schedule=Schedule(seed, order)).errors
    for seed in range(3):
        result = run(without(body, "bar.warp.sync"), threads=64, schedule=Schedule(seed))
        assert {x.kind for x in result.errors} & {"race", "uninitialised"}
