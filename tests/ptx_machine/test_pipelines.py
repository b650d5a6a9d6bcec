"""Rings of buffers: mbarriers with bulk copies and tensor copies, cp.async with groups."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_machine.kernels import lines_of, output, run, swapped, without
from tools.ptx_machine.memory import Array
from tools.ptx_machine.schedules import ORDERS, Schedule
from tools.ptx_machine.tensor_maps import TensorMap

CHUNKS = 6

# Thread 0 copies chunks of 128 bytes to two slots; warp 1 adds them up.
RING = """
mov.u32 %r10, memory;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra started;
mbarrier.init.shared.b64 [memory], 1;
mbarrier.init.shared.b64 [memory+8], 1;
mbarrier.init.shared.b64 [memory+16], 32;
mbarrier.init.shared.b64 [memory+24], 32;
fence.mbarrier_init.release.cluster;
started:
bar.sync 0;
mov.u32 %r3, 0;
mov.u32 %r20, 0;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra consume;
setp.ne.u32 %p2, %r1, 0;
@%p2 bra done;
produce:
and.b32 %r4, %r3, 1;
shr.u32 %r5, %r3, 1;
and.b32 %r6, %r5, 1;
xor.b32 %r6, %r6, 1;
shl.b32 %r7, %r4, 3;
add.u32 %r8, %r10, %r7;
shl.b32 %r9, %r4, 7;
add.u32 %r9, %r9, %r10;
shl.b32 %r11, %r3, 7;
cvt.u64.u32 %d5, %r11;
add.u64 %d5, %d0, %d5;
wait_empty:
mbarrier.try_wait.parity.shared.b64 %p3, [%r8+16], %r6;
@!%p3 bra wait_empty;
mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r9+128], [%d5], 128, [%r8];
add.u32 %r3, %r3, 1;
setp.lt.u32 %p4, %r3, 6;
@%p4 bra produce;
bra done;
consume:
and.b32 %r4, %r3, 1;
shr.u32 %r5, %r3, 1;
and.b32 %r6, %r5, 1;
shl.b32 %r7, %r4, 3;
add.u32 %r8, %r10, %r7;
shl.b32 %r9, %r4, 7;
add.u32 %r9, %r9, %r10;
shl.b32 %r12, %r1, 2;
add.u32 %r9, %r9, %r12;
wait_full:
mbarrier.try_wait.parity.shared.b64 %p3, [%r8], %r6;
@!%p3 bra wait_full;
ld.shared.u32 %r13, [%r9+128];
add.u32 %r20, %r20, %r13;
mbarrier.arrive.shared.b64 _, [%r8+16];
add.u32 %r3, %r3, 1;
setp.lt.u32 %p4, %r3, 6;
@%p4 bra consume;
cvt.u64.u32 %d6, %r12;
add.u64 %d6, %d1, %d6;
st.global.u32 [%d6], %r20;
done:
"""
LINES = {text: i for i, text in enumerate((x.strip() for x in RING.strip().splitlines()), 1)}


def line(start: str, last: bool = False) -> int:
    """The line of RING that begins so."""
    found = [i for text, i in LINES.items() if text.startswith(start)]
    return found[-1 if last else 0]


def ring(body: str, schedule: Schedule | None = None):
    values = np.arange(CHUNKS * 32, dtype=np.uint32)
    result = run(body, Array("in", values), output(32), threads=64, schedule=schedule, limit=60_000)
    return result, values.reshape(CHUNKS, 32).sum(0, dtype=np.uint32)


@pytest.mark.parametrize("order", ORDERS)
def test_ring(order: str) -> None:
    for seed in range(3):
        result, want = ring(RING, Schedule(seed, order, ("nan", "random", "zero")[seed]))
        assert not result.findings
        assert result.finished
        np.testing.assert_array_equal(result.arrays["out"], want)
        assert result.written == {"out"}
        assert not result.unwritten("out").any()


def every(body: str, count: int = 7):
    """Runs under several schedules."""
    return [ring(body, Schedule(seed, ORDERS[seed % len(ORDERS)]))[0] for seed in range(count)]


def test_ring_without_a_wait_for_full() -> None:
    body = without(without(RING, "@!%p3 bra wait_full"), r"try_wait.*\[%r8\]")
    found = [lines_of(r) for r in every(body)]
    early = ("uninitialised", line("ld.shared"), 0)
    late = ("race", line("ld.shared"), line("cp.async.bulk"))
    assert all(early in x or late in x for x in found)
    assert any(late in x for x in found)


def test_ring_without_a_wait_for_empty() -> None:
    body = without(without(RING, "@!%p3 bra wait_empty"), r"try_wait.*\[%r8\+16\]")
    for result in every(body):
        assert "2 arrivals in a phase of 1" in result.findings[-1].message
        assert result.findings[-1].source == f"kernel.py:{line('mbarrier.arrive.expect')}"


def test_ring_with_a_wrong_phase() -> None:
    body = swapped(RING, "xor.b32 %r6, %r6, 1;", "xor.b32 %r6, %r6, 0;")
    for result in every(body, 3):
        assert not result.finished
        assert "deadlock" in result.findings[-1].message
        assert "parity 0" in result.findings[-1].message


def test_ring_whose_consumer_does_not_arrive() -> None:
    for result in every(without(RING, r"mbarrier.arrive.shared"), 3):
        assert "deadlock" in result.findings[-1].message
        assert f"kernel.py:{line('mbarrier.try_wait')}" in result.findings[-1].message


def test_ring_whose_bytes_are_not_expected() -> None:
    expecting = "mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128"
    body = swapped(RING, expecting, "mbarrier.arrive.shared.b64 _, [%r8]")
    found = [x for r in every(body) for x in r.errors]
    assert any("not expected" in x.message for x in found)


def test_ring_with_a_wrong_number_of_arrivals() -> None:
    body = swapped(RING, "[memory+16], 32", "[memory+16], 1")
    for result in every(body, 3):
        assert "arrivals in a phase of 1" in result.findings[-1].message


def test_ring_without_a_fence_of_the_initialisation() -> None:
    for result in every(without(RING, "fence.mbarrier_init"), 3):
        assert ("proxy", line("cp.async.bulk"), line("mbarrier.init")) in lines_of(result)


def test_ring_without_a_barrier_after_the_initialisation() -> None:
    found = [x for r in every(without(RING, "bar.sync 0")) for x in r.errors]
    assert any("initialisation" in x.message or "no mbarrier" in x.message for x in found)


def test_ring_that_one_lane_releases_too_early() -> None:
    """One lane arrives for its warp, without bar.warp.sync: others may not have read."""
    one = swapped(RING, "[memory+16], 32", "[memory+16], 1").replace("[memory+24], 32", "[memory+24], 1")
    one = swapped(one, "setp.ge.u32 %p1, %r0, 32;", "setp.ge.u32 %p1, %r0, 32;\nsetp.eq.u32 %p5, %r1, 3;")
    bad = swapped(one, "mbarrier.arrive.shared.b64 _,", "@%p5 mbarrier.arrive.shared.b64 _,")
    good = swapped(bad, "@%p5 mbarrier", "bar.warp.sync -1;\n@%p5 mbarrier")
    assert not any(r.findings for r in every(good))
    for result in every(bad, 3):
        kinds = {x.kind: x.message for x in result.errors}
        assert "not ordered after a read" in kinds["race"]
        assert "reused too early" in kinds["barrier"]


def test_a_phase_that_completes_twice_before_a_waiter_looks() -> None:
    """Warp 1 looks at phase 0 after phase 1; in other schedules it could have looked too late."""
    body = """
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra started;
    mbarrier.init.shared.b64 [memory], 32;
    started:
    bar.sync 0;
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra look;
    mbarrier.arrive.shared.b64 _, [memory];
    mbarrier.arrive.shared.b64 _, [memory];
    bra done;
    look:
    mbarrier.try_wait.parity.shared.b64 %p3, [memory], 0;
    @!%p3 bra look;
    done:
    """
    found = {}
    for seed in range(12):
        result = run(body, threads=64, schedule=Schedule(seed, ORDERS[seed % 7]))
        found[result.finished] = [x.message for x in result.errors if x.kind == "barrier"]
    [message] = found[False]
    assert message == "an mbarrier was reused too early: two phases completed before this waiter looked"
    assert not found.get(True) or "next phase can complete" in found[True][0]


# Blocks of 8 rows: loaded with a tensor map, doubled, stored with another.
TENSOR = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra started;
mbarrier.init.shared.b64 [memory+2048], 1;
fence.proxy.async.shared::cta;
mov.u64 %d3, maps;
mul.lo.u32 %r3, %r2, 8;
mbarrier.arrive.expect_tx.shared.b64 _, [memory+2048], 512;
mov.u32 %r4, memory;
cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%d3, {0, %r3}], [%r4+2048];
started:
bar.sync 0;
wait:
mbarrier.try_wait.parity.shared.b64 %p3, [memory+2048], 0;
@!%p3 bra wait;
mov.u32 %r4, memory;
shl.b32 %r5, %r0, 4;
add.u32 %r4, %r4, %r5;
ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r4];
add.u32 %r6, %r6, %r6;
st.shared.v4.u32 [%r4], {%r6, %r7, %r8, %r9};
fence.proxy.async.shared::cta;
bar.sync 1;
@%p0 bra done;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d3+128, {0, %r3}], [memory];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
done:
"""


def tensor(body: str, schedule: Schedule | None = None, rows: int = 13):
    values = np.arange(rows * 16, dtype=np.uint32).reshape(rows, 16)
    maps = tuple(TensorMap((i + 1) << 32, 4, (16, rows), (4, 64), (16, 8), 16) for i in range(2))
    out = Array("out", np.zeros_like(values), False)
    result = run(body, Array("in", values), out, grid=2, maps=maps, schedule=schedule)
    want = values.copy()
    want[:, ::4] *= 2
    return result, want


def test_tensor_copies() -> None:
    for seed, order in enumerate(ORDERS):
        result, want = tensor(TENSOR, Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], want)


def test_tensor_store_without_a_proxy_fence() -> None:
    body = swapped(TENSOR, "fence.proxy.async.shared::cta;\nbar.sync 1", "bar.sync 1")
    result, _ = tensor(body)
    assert [(x.kind, "without fence.proxy.async" in x.message) for x in result.errors] == [("proxy", True)]
    assert result.errors[0].text.startswith("cp.async.bulk.tensor.2d.global")


def test_tensor_store_with_a_fence_of_one_lane_only() -> None:
    fence = "fence.proxy.async.shared::cta;\nbar.sync 1"
    body = swapped(TENSOR, fence, "@!%p0 " + fence)
    result, _ = tensor(body)
    assert {x.kind for x in result.errors} == {"proxy"}


def test_tensor_store_without_a_barrier() -> None:
    result, _ = tensor(without(TENSOR, "bar.sync 1"))
    assert {x.kind for x in result.errors} == {"race"}


def test_tensor_store_that_nothing_waits_for() -> None:
    result, _ = tensor(without(TENSOR, "wait_group.read"))
    assert {x.kind for x in result.errors} == {"exit"}


def test_tensor_copies_are_aligned() -> None:
    result, _ = tensor(TENSOR.replace("[%r4], [%d3,", "[%r4+64], [%d3,"))
    assert "misaligned" in result.findings[-1].message


# Each thread writes a number to global memory; thread 0 copies them to shared memory, and back to elsewhere.
THROUGH = """
mov.u32 %r10, memory;
shl.b32 %r11, %r0, 2;
cvt.u64.u32 %d5, %r11;
add.u64 %d6, %d0, %d5;
add.u64 %d7, %d1, %d5;
st.global.u32 [%d6], %r0;
fence.proxy.async.global;
setp.ne.u32 %p0, %r0, 0;
@!%p0 mbarrier.init.shared.b64 [%r10+1024], 1;
@!%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p0 bra wait;
mbarrier.arrive.expect_tx.shared.b64 _, [%r10+1024], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d0], 128, [%r10+1024];
wait:
mbarrier.try_wait.parity.shared.b64 %p3, [%r10+1024], 0;
@!%p3 bra wait;
@%p0 bra together;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
together:
bar.sync 0;
ld.global.u32 %r12, [%d7];
add.u32 %r12, %r12, %r12;
st.global.u32 [%d7], %r12;
"""


def through(body: str, schedule: Schedule | None = None):
    return run(body, Array("in", np.zeros(32, np.uint32), False), output(32), schedule=schedule)


def test_copies_through_global_memory() -> None:
    for seed, order in enumerate(ORDERS):
        result = through(THROUGH, Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], 2 * np.arange(32))


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (lambda: without(THROUGH, "fence.proxy.async"), "proxy", "cp.async.bulk.shared"),
        (lambda: swapped(THROUGH, "async.global;", "async.shared::cta;"), "proxy", "cp.async.bulk.shared"),
        (lambda: swapped(THROUGH, "wait_group 0", "wait_group.read 0"), "race", "ld.global"),
        (lambda: swapped(THROUGH, "together:\nbar.sync 0;", "together:"), "race", "ld.global"),
    ],
)
def test_copies_through_global_memory_with_a_fault(fault, kind: str, text: str) -> None:
    for seed in range(3):
        result = through(fault(), Schedule(seed, ORDERS[seed]))
        assert any(x.kind == kind and x.text.startswith(text) for x in result.errors)


# Two buffers of 32 words; each thread copies 4 bytes and reads its neighbour's.
SMALL = """
mov.u32 %r10, memory;
shl.b32 %r11, %r0, 2;
add.u32 %r10, %r10, %r11;
cvt.u64.u32 %d5, %r11;
add.u64 %d5, %d0, %d5;
cp.async.ca.shared.global [%r10], [%d5], 4;
cp.async.commit_group;
mov.u32 %r3, 0;
mov.u32 %r20, 0;
xor.b32 %r12, %r11, 4;
mov.u32 %r13, memory;
add.u32 %r12, %r12, %r13;
next:
add.u32 %r4, %r3, 1;
setp.ge.u32 %p1, %r4, 6;
and.b32 %r5, %r4, 1;
shl.b32 %r5, %r5, 8;
add.u32 %r6, %r10, %r5;
shl.b32 %r7, %r4, 8;
cvt.u64.u32 %d6, %r7;
add.u64 %d6, %d5, %d6;
@%p1 bra last;
cp.async.ca.shared.global [%r6], [%d6], 4;
last:
cp.async.commit_group;
cp.async.wait_group 1;
bar.sync 0;
and.b32 %r8, %r3, 1;
shl.b32 %r8, %r8, 8;
add.u32 %r8, %r12, %r8;
ld.shared.u32 %r9, [%r8];
add.u32 %r20, %r20, %r9;
bar.sync 1;
add.u32 %r3, %r3, 1;
setp.lt.u32 %p2, %r3, 6;
@%p2 bra next;
add.u64 %d7, %d1, %d5;
sub.u64 %d7, %d7, %d0;
st.global.u32 [%d7], %r20;
"""


def small(body: str, schedule: Schedule | None = None):
    values = np.arange(6 * 64, dtype=np.uint32)
    result = run(body, Array("in", values), output(64), threads=64, schedule=schedule)
    return result, values.reshape(6, 64)[:, np.arange(64) ^ 1].sum(0, dtype=np.uint32)


def test_double_buffer_of_small_copies() -> None:
    for seed, order in enumerate(ORDERS):
        result, want = small(SMALL, Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], want)


TOO_EARLY = "load of shared memory is not ordered after a write"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: without(SMALL, "wait_group"), TOO_EARLY),
        (lambda: swapped(SMALL, "wait_group 1", "wait_group 2"), TOO_EARLY),
        (lambda: without(SMALL, "bar.sync 0"), TOO_EARLY),
        (lambda: without(SMALL, "bar.sync 1"), "cp.async of shared memory is not ordered after a read"),
        (lambda: swapped(SMALL, "bar.sync 0", "bar.warp.sync -1"), ""),
    ],
)
def test_double_buffer_with_a_fault(fault, message: str) -> None:
    for seed in range(3):
        result, _ = small(fault(), Schedule(seed, ORDERS[2 * seed]))
        if message:
            assert message in {x.message for x in result.errors}
        else:  # neighbours are lanes of one warp
            assert not result.errors


def test_small_copies_tell_an_mbarrier() -> None:
    body = """
    mov.u32 %r10, memory;
    shl.b32 %r11, %r0, 2;
    add.u32 %r12, %r10, %r11;
    cvt.u64.u32 %d5, %r11;
    add.u64 %d6, %d0, %d5;
    setp.ne.u32 %p0, %r0, 0;
    @!%p0 mbarrier.init.shared.b64 [memory+1024], 64;
    bar.sync 0;
    cp.async.ca.shared.global [%r12], [%d6], 4;
    cp.async.mbarrier.arrive.noinc.shared.b64 [memory+1024];
    wait:
    mbarrier.try_wait.parity.shared.b64 %p3, [memory+1024], 0;
    @!%p3 bra wait;
    xor.b32 %r13, %r11, 128;
    add.u32 %r13, %r13, %r10;
    ld.shared.u32 %r14, [%r13];
    add.u64 %d7, %d1, %d5;
    st.global.u32 [%d7], %r14;
    """
    values = np.arange(64, dtype=np.uint32)
    for seed, order in enumerate(ORDERS):
        result = run(body, Array("in", values), output(64), threads=64, schedule=Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], values ^ 32)
    bad = without(without(body, "bra wait"), "try_wait")
    assert "race" in {x.kind for x in run(bad, Array("in", values), output(64), threads=64).errors}
