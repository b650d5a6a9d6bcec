"""Checks without execution."""

from __future__ import annotations

import pytest

from tests.ptx_machine.one_instruction import kernel
from tools.ptx_machine.static import suspicions
from tools.ptx_machine.syntax import parse

D = "{%r1, %r2, %r3, %r4}"
PRODUCT = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D}, %rd1, %rd2, %p1, 1, 1, 0, 0;"
FROM_REGISTERS = (
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D}, {{%r5, %r6, %r7, %r8}}, %rd2, %p1, 1, 1, 0;"
)
FENCE = "wgmma.fence.sync.aligned;"
START = "mov.b64 %rd1, 0; mov.b64 %rd2, 0; setp.eq.b64 %p1, %rd1, 0;" + "".join(
    f"mov.b32 %r{i}, 0;" for i in range(1, 10)
)


def found(body: str) -> list[str]:
    return [suspicion.message for suspicion in suspicions(parse(kernel(START + body)))]


def test_a_fenced_product_is_fine() -> None:
    assert found(FENCE + PRODUCT + PRODUCT) == []
    assert found(f"add.s32 %r1, %r1, 1; {FENCE} add.s32 %r9, %r9, 1; {PRODUCT}") == []
    assert found(f"{FENCE} TOP: {PRODUCT} add.s32 %r9, %r1, 1; @%p1 bra TOP;") == []


@pytest.mark.parametrize(
    ("body", "register"),
    [
        (f"{FENCE} add.s32 %r1, %r1, 1; {PRODUCT}", "%r1"),
        (f"{FENCE} ld.shared.v2.b32 {{%r9, %r4}}, [%r9]; {PRODUCT}", "%r4"),
        (f"{FENCE} @%p1 mov.b32 %r6, 0; {FROM_REGISTERS}", "%r6"),
        (f"{FENCE} @%p1 bra SKIP; mov.b32 %r2, 0; SKIP: {PRODUCT}", "%r2"),
        (f"{FENCE} TOP: {PRODUCT} mov.b32 %r3, 0; @%p1 bra TOP;", "%r3"),
    ],
)
def test_a_register_written_after_the_fence(body: str, register: str) -> None:
    [suspicion] = suspicions(parse(kernel(START + body)))
    assert suspicion.message == f"{register} of wgmma.mma_async is written after the last wgmma.fence"
    assert suspicion.instruction.parts[0] == "wgmma"
    assert suspicion.other is not None and register in suspicion.other.text


def test_a_fence_that_some_path_misses() -> None:
    assert found(PRODUCT) == ["wgmma.mma_async without a wgmma.fence before it"]
    assert found(f"@%p1 bra SKIP; {FENCE} SKIP: {PRODUCT}") == [
        "wgmma.mma_async without a wgmma.fence before it"
    ]


def test_a_register_that_no_path_writes() -> None:
    assert found("add.s32 %r20, %r21, 1;") == ["%r21 is read, but never written before"]
    assert found("st.shared.b32 [%r22], %r1;") == ["%r22 is read, but never written before"]
    assert found("@%p9 bra END; END:") == ["%p9 is read, but never written before"]
    assert found("@%p1 mov.b32 %r20, 0; add.s32 %r9, %r20, 1;") == []
    assert found("bra END; add.s32 %r9, %r23, 1; END:") == []  # no path leads there
    assert found("elect.sync %r20|%p2, -1; @%p2 st.shared.b32 [%r20], %r1;") == []
    assert (
        found("mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r2;")
        == []
    )
