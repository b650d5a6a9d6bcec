"""Matrix products of warps and warpgroups, and matrices in shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_machine.kernels import lines_of, run, swapped, without
from tools.ptx_machine.memory import Array
from tools.ptx_machine.products import times
from tools.ptx_machine.schedules import ORDERS, Schedule

RANDOM = np.random.default_rng(0)


def halves(*shape: int) -> np.ndarray:
    return RANDOM.integers(-8, 8, shape).astype(np.float16)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_a_row_has_the_same_sums_in_every_place(size: int) -> None:
    row, right = (
        RANDOM.normal(size=shape).astype(np.float16).astype(np.float32) for shape in (size, (128, size))
    )
    every = times(np.tile(row, (64, 1)), right)
    np.testing.assert_array_equal(every, np.tile(times(row[None], right), (64, 1)))
    np.testing.assert_allclose(every[0], (row.astype(np.float64) * right).sum(-1), rtol=1e-6, atol=1e-6)


# A [16, 16] and B^T [8, 16] in shared memory without swizzle; D [16, 8].
SYNC = """
shl.b32 %r3, %r0, 4;
mov.u32 %r4, memory;
add.u32 %r5, %r4, %r3;
cvt.u64.u32 %d5, %r3;
add.u64 %d6, %d0, %d5;
add.u64 %d7, %d1, %d5;
ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d6];
st.shared.v4.u32 [%r5], {%r10, %r11, %r12, %r13};
setp.lt.u32 %p0, %r0, 16;
@%p0 ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d7];
@%p0 st.shared.v4.u32 [%r5+512], {%r10, %r11, %r12, %r13};
bar.warp.sync -1;
and.b32 %r6, %r0, 15;
shl.b32 %r6, %r6, 5;
shr.u32 %r7, %r0, 4;
shl.b32 %r7, %r7, 4;
add.u32 %r6, %r6, %r7;
add.u32 %r6, %r6, %r4;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r20, %r21, %r22, %r23}, [%r6];
and.b32 %r6, %r0, 7;
shl.b32 %r6, %r6, 5;
shr.u32 %r7, %r0, 3;
and.b32 %r7, %r7, 1;
shl.b32 %r7, %r7, 4;
add.u32 %r6, %r6, %r7;
add.u32 %r6, %r6, %r4;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r24, %r25}, [%r6+512];
mov.b32 %r30, 0f3F800000;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r31, %r32, %r33, %r34}, {%r20, %r21, %r22, %r23}, {%r24, %r25}, {%r30, %r30, %r30, %r30};
shr.u32 %r6, %r0, 2;
and.b32 %r7, %r0, 3;
shl.b32 %r6, %r6, 5;
shl.b32 %r7, %r7, 3;
add.u32 %r6, %r6, %r7;
cvt.u64.u32 %d8, %r6;
add.u64 %d8, %d8, %d2;
st.global.v2.u32 [%d8], {%r31, %r32};
st.global.v2.u32 [%d8+256], {%r33, %r34};
"""  # noqa: E501


def sync(body: str):
    a, b = halves(16, 16), halves(8, 16)
    out = Array("out", np.zeros((16, 8), np.float32), False)
    result = run(body, Array("a", a), Array("b", b), out)
    return result, a.astype(np.float32) @ b.astype(np.float32).T + 1


def test_product_of_a_warp() -> None:
    result, want = sync(SYNC)
    assert not result.findings
    np.testing.assert_array_equal(result.arrays["out"], want)


def test_product_of_a_warp_without_a_barrier() -> None:
    result, _ = sync(without(SYNC, "bar.warp.sync"))
    assert {(kind, line) for kind, line, _ in lines_of(result)} == {("race", 19), ("race", 27)}


def test_product_of_a_warp_with_swapped_operands() -> None:
    result, want = sync(swapped(SYNC, "{%r20, %r21, %r22, %r23}, {%r24", "{%r20, %r22, %r21, %r23}, {%r24"))
    assert not (result.arrays["out"] == want).all()


def test_rows_of_matrices_are_aligned() -> None:
    result, _ = sync(SYNC.replace("[%r6+512];\nmov", "[%r6+520];\nmov"))
    assert "misaligned: a row of ldmatrix" in result.findings[-1].message


def test_matrices_are_stored() -> None:
    """Transposed, by stmatrix."""
    body = """
    shl.b32 %r3, %r0, 2;
    cvt.u64.u32 %d5, %r3;
    add.u64 %d6, %d0, %d5;
    add.u64 %d7, %d1, %d5;
    ld.global.u32 %r4, [%d6];
    and.b32 %r5, %r0, 7;
    shl.b32 %r5, %r5, 4;
    mov.u32 %r6, memory;
    add.u32 %r5, %r5, %r6;
    stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r5], {%r4};
    bar.warp.sync -1;
    add.u32 %r6, %r6, %r3;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%d7], %r7;
    """
    given = halves(8, 8)
    out = Array("out", np.zeros((8, 8), np.float16), False)
    result = run(body, Array("in", given), out)
    assert not result.findings
    np.testing.assert_array_equal(result.arrays["out"], given.T)
    assert {x.kind for x in run(without(body, "bar.warp.sync"), Array("in", given), out).errors} == {"race"}


def descriptor(start: int, leading: int, stride: int) -> int:
    """Without swizzle."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32


# A [64, 16] and B^T [8, 16], both K-major without swizzle: cores of 8 rows of 16 bytes, two along K.
# 128 threads copy A to memory, 16 of them B. Twice the product.
ASYNC = f"""
shl.b32 %r3, %r0, 5;
cvt.u64.u32 %d5, %r3;
add.u64 %d6, %d0, %d5;
add.u64 %d7, %d1, %d5;
mov.u32 %r4, memory;
shr.u32 %r5, %r0, 3;
shl.b32 %r5, %r5, 8;
and.b32 %r6, %r0, 7;
shl.b32 %r6, %r6, 4;
add.u32 %r5, %r5, %r6;
add.u32 %r5, %r5, %r4;
setp.lt.u32 %p0, %r0, 64;
@%p0 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d6];
@%p0 st.shared.v4.u32 [%r5], {{%r10, %r11, %r12, %r13}};
@%p0 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d6+16];
@%p0 st.shared.v4.u32 [%r5+128], {{%r10, %r11, %r12, %r13}};
setp.lt.u32 %p1, %r0, 8;
@%p1 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d7];
@%p1 st.shared.v4.u32 [%r5+2048], {{%r10, %r11, %r12, %r13}};
@%p1 ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%d7+16];
@%p1 st.shared.v4.u32 [%r5+2176], {{%r10, %r11, %r12, %r13}};
fence.proxy.async;
bar.sync 0;
mov.b32 %r20, 0;
mov.b32 %r21, 0;
mov.b32 %r22, 0;
mov.b32 %r23, 0;
setp.eq.u32 %p2, %r0, %r0;
mov.u64 %d8, {descriptor(1024, 128, 256)};
mov.u64 %d9, {descriptor(3072, 128, 256)};
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r20, %r21, %r22, %r23}}, %d8, %d9, 0, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r20, %r21, %r22, %r23}}, %d8, %d9, %p2, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
@%p0 st.shared.v4.u32 [%r5], {{%r10, %r11, %r12, %r13}};
shr.u32 %r6, %r0, 5;
shl.b32 %r6, %r6, 4;
shr.u32 %r7, %r1, 2;
add.u32 %r6, %r6, %r7;
shl.b32 %r6, %r6, 5;
and.b32 %r7, %r1, 3;
shl.b32 %r7, %r7, 3;
add.u32 %r6, %r6, %r7;
cvt.u64.u32 %d10, %r6;
add.u64 %d10, %d10, %d2;
st.global.v2.u32 [%d10], {{%r20, %r21}};
st.global.v2.u32 [%d10+256], {{%r22, %r23}};
"""


def asynchronous(body: str, schedule: Schedule | None = None):
    a, b = halves(64, 16), halves(8, 16)
    out = Array("out", np.zeros((64, 8), np.float32), False)
    result = run(body, Array("a", a), Array("b", b), out, threads=128, schedule=schedule)
    return result, 2 * a.astype(np.float32) @ b.astype(np.float32).T


GOOD = ASYNC.replace("wait_group.sync.aligned 0;\n", "wait_group.sync.aligned 0;\nbar.sync 0;\n")


def test_product_of_a_warpgroup() -> None:
    for seed, order in enumerate(ORDERS):
        result, want = asynchronous(GOOD, Schedule(seed, order))
        assert not result.findings
        np.testing.assert_array_equal(result.arrays["out"], want)


def test_operand_that_is_overwritten() -> None:
    """A warp's wait covers its own products: others may still read what it overwrites."""
    result, _ = asynchronous(ASYNC)
    assert {x.kind for x in result.errors} == {"race"}
    result, _ = asynchronous(without(GOOD, "wait_group"))
    assert "race" in {x.kind for x in result.errors}


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (lambda: without(GOOD, "fence.proxy.async"), {"proxy"}),
        (lambda: swapped(GOOD, "async;\nbar.sync 0;", "async;"), {"race", "uninitialised operand"}),
        (lambda: without(GOOD, "wgmma.fence"), {"fence"}),
        (lambda: swapped(GOOD, "fence.sync.aligned;", "fence.sync.aligned;\nmov.b32 %r22, %r3;"), {"fence"}),
        (lambda: swapped(GOOD, "wait_group.sync.aligned 0", "wait_group.sync.aligned 1"), {"race", "exit"}),
    ],
)
def test_product_of_a_warpgroup_with_a_fault(fault, kinds: set[str]) -> None:
    for seed in range(3):
        result, _ = asynchronous(fault(), Schedule(seed, ORDERS[seed]))
        found = {x.kind for x in result.findings}
        assert found, "nothing found"
        assert found <= kinds


def test_wrong_descriptors() -> None:
    wrong = GOOD.replace(str(descriptor(1024, 128, 256)), str(descriptor(1024, 256, 128)))
    result, want = asynchronous(wrong)
    assert not (result.arrays["out"] == want).all()
    outside = GOOD.replace(str(descriptor(3072, 128, 256)), str(descriptor(16384, 128, 256)))
    result, _ = asynchronous(outside)
    assert "out of bounds" in result.findings[-1].message


def test_accumulator_that_is_read_too_early() -> None:
    wait = "wgmma.wait_group.sync.aligned 0;"
    early = swapped(GOOD, wait, f"mov.b32 %r40, %r20;\n{wait}\nmov.b32 %r20, %r40;")
    result, _ = asynchronous(early)
    assert np.isnan(result.arrays["out"]).any()
    assert any("register of an accumulator" in x.message and "%r40, %r20" in x.text for x in result.errors)


def test_lanes_that_do_not_come_to_a_product() -> None:
    body = SYNC.replace("mma.sync", "setp.ne.u32 %p3, %r0, 5;\n@!%p3 bra away;\nmma.sync", 1)
    body = body.replace("[%d8+256], {%r33, %r34};", "[%d8+256], {%r33, %r34};\naway:\nbar.warp.sync -1;")
    result, _ = sync(body)
    assert "deadlock" in result.findings[-1].message
    assert "other lanes" in result.findings[-1].message
