"""Alignment of bulk copies, read from PTX."""

from __future__ import annotations

from copy_alignment import bulk_copies

LOAD = "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes"
PTX = """
	mov.b64 	%rd1, __dynamic_shmem__0;
	cvt.u32.u64 	%r1, %rd1;
	mov.b32 	%r2, 0;
$L__BB0_1:
	and.b32 	%r3, %r2, 3;
	shl.b32 	%r4, %r3, {shift};
	add.s32 	%r5, %r1, %r4;
	add.s32 	%r6, %r5, {offset};
	@%p1 {load} [%r6], [%rd4, {{%r7,%r8}}], [%r9];
	mul.lo.s32 	%r10, %r2, 48;
	add.s32 	%r11, %r10, %r1;
	@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd14], [%r11], %r21;
	cp.async.bulk.commit_group;
	add.s32 	%r2, %r2, {step};
	@%p2 bra 	$L__BB0_1;
"""


def aligned(shift: int = 7, offset: int = 256, step: int = 1) -> list[bool]:
    return [okay for _, okay in bulk_copies(PTX.format(shift=shift, offset=offset, step=step, load=LOAD))]


def test_addresses_are_followed_through_arithmetic_and_loops() -> None:
    assert aligned() == [True, True]
    assert aligned(offset=192) == aligned(offset=64) == [False, True]
    assert aligned(shift=6) == [False, True]
    assert aligned(shift=6, step=2) == [True, True]


def test_what_is_not_known_counts_as_misaligned() -> None:
    ptx = (
        f"ld.shared.b32 %r1, [%r2];\n@%p1 {LOAD} [%r1], [%rd4, {{%r7}}], [%r9];\nadd.s32 %r3, %r4, 16;\n@%p1"
        f" {LOAD} [%r3+128], [%rd4];"
    )
    assert [okay for _, okay in bulk_copies(ptx)] == [False, False]
    assert "1 bytes: cp.async.bulk.tensor" in bulk_copies(ptx)[0][0]
