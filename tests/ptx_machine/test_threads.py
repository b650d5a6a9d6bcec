"""Threads and memory: lanes as threads of their own, flags, bounds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_machine.kernels import lines_of, output, run, source, swapped, without
from tools.ptx_machine import ORDERS, Array, Launch, Schedule, Unsupported, execute, parse, translate

# Each lane reads what its neighbour wrote, twice.
EXCHANGE = """
shl.b32 %r3, %r0, 2;
mov.u32 %r4, memory;
add.u32 %r5, %r4, %r3;
xor.b32 %r6, %r5, 4;
st.shared.u32 [%r5], %r0;
bar.warp.sync 0xffffffff;
ld.shared.u32 %r7, [%r6];
bar.warp.sync -1;
st.shared.u32 [%r5], %r7;
ld.shared.u32 %r8, [%r5];
cvt.u64.u32 %d5, %r3;
add.u64 %d6, %d0, %d5;
st.global.u32 [%d6], %r8;
"""


def test_lanes_exchange_through_memory() -> None:
    for seed, order in enumerate(ORDERS):
        result = run(EXCHANGE, output(32), schedule=Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], np.arange(32) ^ 1)


def test_lanes_without_a_barrier() -> None:
    first = without(EXCHANGE, "bar.warp.sync 0xffffffff")
    assert ("race", 7, 5) in lines_of(run(first, output(32)))
    assert lines_of(run(without(EXCHANGE, "bar.warp.sync -1"), output(32))) == {("race", 9, 7)}


@pytest.mark.parametrize(
    "instead",
    ["shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;", "vote.sync.ballot.b32 %r9, 1, -1;", "elect.sync %r9|%p9, -1;"],
)
def test_exchange_among_lanes_orders_no_memory(instead: str) -> None:
    result = run(swapped(EXCHANGE, "bar.warp.sync 0xffffffff;", instead), output(32))
    assert ("race", 7, 5) in lines_of(result)


def test_a_barrier_of_half_a_warp_orders_that_half() -> None:
    low, high = "@%p1 bar.warp.sync 0xffff;", "@!%p1 bar.warp.sync 0xffff0000;"
    half = swapped(EXCHANGE, "bar.warp.sync 0xffffffff;", f"setp.lt.u32 %p1, %r1, 16;\n{low}")
    assert ("race", 8, 5) in lines_of(run(half, output(32)))
    result = run(half.replace(low, f"{low}\n{high}"), output(32))
    assert not result.findings
    np.testing.assert_array_equal(result.arrays["out"], np.arange(32) ^ 1)


def test_bytes_of_one_word_belong_to_their_lanes() -> None:
    body = """
    mov.u32 %r4, memory;
    add.u32 %r5, %r4, %r0;
    cvt.u16.u32 %h1, %r0;
    st.shared.u8 [%r5], %h1;
    ld.shared.u8 %h2, [%r5];
    add.u16 %h2, %h2, %h2;
    st.shared.u8 [%r5], %h2;
    ld.shared.u8 %r6, [%r5];
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d6, %d0, %d5;
    st.global.u32 [%d6], %r6;
    """
    result = run(
        body.replace("%r6, [%r5]", "%h3, [%r5]").replace("mul.wide", "cvt.u32.u16 %r6, %h3;\nmul.wide"),
        output(32),
    )
    assert not result.findings
    np.testing.assert_array_equal(result.arrays["out"], 2 * np.arange(32))


def test_lanes_that_store_different_values_to_one_place() -> None:
    result = run("st.shared.u32 [memory], %r0;")
    assert [x.kind for x in result.errors] == ["race"]
    assert not run("mov.u32 %r3, 7;\nst.shared.u32 [memory], %r3;").findings


def test_a_lane_waits_for_another_of_its_warp() -> None:
    """Forward progress of diverged lanes: lane 0 polls what lane 1 writes later in the program."""
    body = """
    setp.eq.u32 %p0, %r0, 0;
    mov.u32 %r4, memory;
    mov.u32 %r5, 0;
    @%p0 st.shared.u32 [memory], %r5;
    bar.warp.sync -1;
    @!%p0 bra other;
    poll:
    ld.acquire.cta.shared.u32 %r5, [memory];
    setp.eq.u32 %p1, %r5, 0;
    @%p1 bra poll;
    bra done;
    other:
    setp.eq.u32 %p2, %r0, 1;
    mov.u32 %r6, 1;
    @%p2 st.release.cta.shared.u32 [memory], %r6;
    done:
    """
    result = run(body)
    assert result.finished
    assert not result.findings


# Block 0 gives 32 numbers to block 1, with a flag.
FLAG = """
mul.wide.u32 %d5, %r0, 4;
add.u64 %d6, %d0, %d5;
add.u64 %d7, %d1, %d5;
setp.ne.u32 %p0, %r0, 0;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra take;
st.global.u32 [%d6], %r0;
bar.sync 0;
@%p0 bra done;
mov.u32 %r3, 1;
red.release.gpu.global.add.u32 [%d2], %r3;
bra done;
take:
@%p0 bra together;
poll:
ld.acquire.gpu.global.u32 %r4, [%d2];
setp.eq.u32 %p2, %r4, 0;
@%p2 bra poll;
together:
bar.sync 0;
ld.global.u32 %r5, [%d6];
st.global.u32 [%d7], %r5;
done:
"""


def flag(body: str, schedule: Schedule | None = None):
    zeros = Array("flag", np.zeros(1, np.uint32))
    given = Array("through", np.zeros(32, np.uint32), False), output(32), zeros
    return run(body, *given, grid=2, schedule=schedule, limit=60_000)


def test_flag_between_blocks() -> None:
    for seed, order in enumerate(ORDERS):
        result = flag(FLAG, Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], np.arange(32))
        assert result.written == {"through", "out", "flag"}


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("red.release.gpu", "red.relaxed.gpu", {"race"}),
        ("red.release.gpu", "red.release.cta", {"race"}),
        ("ld.acquire.gpu", "ld.relaxed.gpu", {"race"}),
        ("ld.acquire.gpu.global", "ld.global", {"race"}),
        ("bar.sync 0;\n@%p0 bra done;", "@%p0 bra done;", {"race"}),
        ("together:\nbar.sync 0;", "together:", {"race"}),
    ],
)
def test_flag_with_a_fault(old: str, new: str, kinds: set[str]) -> None:
    for seed in range(4):
        result = flag(swapped(FLAG, old, new), Schedule(seed, ORDERS[seed]))
        found = {x.kind for x in result.errors}
        assert found & {"race", "uninitialised"}, (seed, found)
        assert found <= {"race", "uninitialised"}


def test_flag_with_fences_instead() -> None:
    body = swapped(FLAG, "red.release.gpu.global", "fence.acq_rel.gpu;\nred.relaxed.gpu.global")
    body = swapped(body, "ld.acquire.gpu.global", "ld.relaxed.gpu.global")
    body = swapped(body, "together:\nbar.sync 0;", "fence.acq_rel.gpu;\ntogether:\nbar.sync 0;")
    for seed, order in enumerate(ORDERS):
        assert not flag(body, Schedule(seed, order)).findings
    result = flag(body.replace("fence.acq_rel.gpu;\ntogether", "together"))
    assert {x.kind for x in result.errors} == {"race"}


def test_a_flag_that_is_never_set() -> None:
    result = flag(without(FLAG, "red.release"))
    assert "no end: threads only poll" in result.findings[-1].message
    assert "block 1 warp 0 lanes 0x1 runs" in result.findings[-1].message


def test_one_resident_block_that_waits_for_a_later_one() -> None:
    body = FLAG.replace("setp.ne.u32 %p1, %r2, 0;", "setp.eq.u32 %p1, %r2, 0;")
    assert flag(body).finished
    assert "no end" in flag(body, Schedule(resident=1)).findings[-1].message


def test_atomics_count() -> None:
    body = "mov.u32 %r3, 2;\natom.global.add.u32 %r4, [%d0], %r3;\nred.global.max.s32 [%d0+4], %r0;"
    result = run(body, Array("out", np.array([5, 2**32 - 7], np.uint32)), threads=64, grid=3)
    assert not result.findings
    assert result.arrays["out"].tolist() == [5 + 2 * 192, 63]


def test_a_plain_load_of_what_others_count() -> None:
    body = "mov.u32 %r3, 2;\nred.global.add.u32 [%d0], %r3;\nld.global.u32 %r4, [%d0];"
    result = run(body, Array("out", np.zeros(1, np.uint32)), threads=64)
    assert {x.kind for x in result.errors} == {"race"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r3, [%d0+128];", "out of bounds: bytes 128 to 131 of in, which has 128"),
        ("ld.global.u32 %r3, [%d0-4];", "out of bounds"),
        ("st.global.v4.u32 [%d0+120], {%r0, %r0, %r0, %r0};", "misaligned"),
        ("ld.global.u32 %r3, [%d0+2];", "misaligned: load of 4 bytes"),
        ("ld.shared.u32 %r3, [memory+4096];", "out of bounds: bytes 5120 to 5123 of shared memory"),
        ("mbarrier.init.shared.b64 [memory+4], 1;", "misaligned: mbarrier"),
        ("mbarrier.arrive.shared.b64 _, [memory];", "no mbarrier"),
        ("bar.sync 17;", "barrier 17"),
        ("bar.sync 1, 48;", "no whole warps"),
        ("setmaxnreg.inc.sync.aligned.u32 20;", "setmaxnreg 20"),
        ("shfl.sync.idx.b32 %r3, %r0, 0, 31, 0xffff;", "membermask"),
        ("trap;", "trap"),
    ],
)
def test_faults(body: str, message: str) -> None:
    result = run(body, Array("in", np.zeros(32, np.uint32)))
    assert not result.finished
    assert result.findings[-1].kind == "fault"
    assert message in result.findings[-1].message
    assert result.findings[-1].source == "kernel.py:1"


def test_what_was_never_written() -> None:
    result = run("ld.shared.u32 %r3, [memory];\nld.global.u32 %r4, [%d0];", output(4))
    assert {(x.kind, x.source) for x in result.errors} == {
        ("uninitialised", "kernel.py:1"),
        ("uninitialised", "kernel.py:2"),
    }
    result = run("atom.global.add.u32 %r4, [%d0], %r0;", output(1))
    assert {x.kind for x in result.errors} == {"uninitialised"}
    result = run("setp.eq.u32 %p0, %r0, 0;\n@%p0 st.global.u32 [%d0+4], %r0;", output(3))
    assert not result.findings
    assert result.unwritten("out").tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert (result.arrays["out"][[0, 2]] == 2**32 - 1).all()


def test_arrays_that_are_given_stay() -> None:
    values = np.arange(32, dtype=np.uint32)
    body = """
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d6, %d0, %d5;
    ld.global.u32 %r3, [%d6];
    add.u32 %r3, %r3, %r3;
    st.global.u32 [%d6], %r3;
    """
    result = run(body, Array("both", values))
    assert not result.findings
    assert values[3] == 3
    np.testing.assert_array_equal(result.arrays["both"], 2 * values)


def test_blocks_that_write_one_place() -> None:
    body = "setp.eq.u32 %p0, %r0, 0;\n@%p0 st.global.u32 [%d0], %r2;"
    result = run(body, output(1), grid=2)
    assert {x.kind for x in result.errors} == {"race"}
    same = run("setp.eq.u32 %p0, %r0, 0;\n@%p0 st.global.u32 [%d0], %r0;", output(1), grid=2)
    assert {x.kind for x in same.findings} == {"same value"}
    assert not same.errors


def test_reads_of_an_input_before_others_write_it() -> None:
    body = """
    mul.wide.u32 %d5, %r1, 4;
    add.u64 %d6, %d0, %d5;
    setp.eq.u32 %p0, %r2, 0;
    @%p0 ld.global.u32 %r3, [%d6];
    @!%p0 st.global.u32 [%d6], %r1;
    """
    for seed in range(3):
        values = np.full(32, 99, np.uint32)
        result = run(body, Array("both", values), grid=2, schedule=Schedule(seed))
        assert {x.kind for x in result.errors} == {"race"}


def test_launches_are_checked() -> None:
    program = translate(parse(source("", 1, 32, 64)))
    with pytest.raises(ValueError, match="2 parameters, the kernel 1"):
        execute(program, Launch((1, 1, 1), (0, 0, 0), (32, 1, 1), 0, (0, 0)), [])
    with pytest.raises(ValueError, match="64 threads"):
        execute(program, Launch((1, 1, 1), (0, 0, 0), (64, 1, 1), 0, (0,)), [])
    with pytest.raises(ValueError, match="same name"):
        execute(program, Launch((1, 1, 1), (0, 0, 0), (32, 1, 1), 0, (0,)), [output(1), output(1)])
    with pytest.raises(Unsupported, match="clusters"):
        execute(program, Launch((2, 1, 1), (2, 1, 1), (32, 1, 1), 0, (0,)), [])
    for text in (
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {%r1}, %d1, %d2, 0;",
        "mapa.u64 %d1, %d2, 0;",
    ):
        with pytest.raises(Unsupported, match=text.split(".")[0]):
            run(text)


def test_schedules_are_checked() -> None:
    for how in ({"order": "fast"}, {"garbage": "ones"}, {"resident": 0}):
        with pytest.raises(ValueError, match=next(iter(how))):
            Schedule(**how)


def test_a_schedule_repeats() -> None:
    first, second = (flag(FLAG, Schedule(5)) for _ in range(2))
    assert first.instructions == second.instructions
    assert len({flag(FLAG, Schedule(i)).instructions for i in range(5)}) > 1
