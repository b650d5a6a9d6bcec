"""Programs: steps, labels, guards, masks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx_machine.one_instruction import execute, kernel
from tools.ptx_machine.rules import Unsupported
from tools.ptx_machine.syntax import parse
from tools.ptx_machine.translate import DTYPES, SPECIAL, Program, translate

LANES = [*range(32)]


def translated(body: str, declared: str = "", params: str = "") -> Program:
    return translate(parse(kernel(body, declared, params)))


def run(program: Program, **given: list[int]) -> dict[str, list[int]]:
    """All registers after the first step, which is arithmetic."""
    values = [np.zeros(32, DTYPES[kind]) for kind in program.kinds]
    for name, value in given.items():
        values[program.index[f"%{name}"]] = np.array(value, DTYPES[program.kinds[program.index[f"%{name}"]]])
    special = [np.full(32, i, np.uint32) for i in range(len(SPECIAL))]
    special[SPECIAL.index("%laneid")] = np.arange(32, dtype=np.uint32)
    with np.errstate(all="ignore"):
        program.steps[0].fast(values, special)
    return {name[1:]: values[i].tolist() for name, i in program.index.items()}


def test_steps_are_cut_at_labels_branches_and_operations() -> None:
    program = translated(
        """
        add.s32 %r1, %r2, 1;
        add.s32 %r1, %r1, 1;
        TOP:
        add.s32 %r1, %r1, 1;
        bar.sync 0;
        @%p1 bra TOP;
        @!%p2 bra END;
        exit;
        END:
        """
    )
    assert [(step.kind, step.count) for step in program.steps] == [
        ("alu", 2),
        ("alu", 1),
        ("operation", 1),
        ("branch", 1),
        ("branch", 1),
        ("return", 1),
        ("return", 1),
    ]
    assert [step.target for step in program.steps if step.kind == "branch"] == [1, 6]
    assert program.labels == {"TOP": 1, "END": 6}
    assert program.steps[0].line == program.steps[0].instructions[0].line
    assert sum(len(step.instructions) for step in program.steps) == len(program.kernel.body)


def test_a_run_sees_its_own_results_in_order() -> None:
    program = translated(
        """
        mov.b32 %r1, 1;
        add.s32 %r2, %r1, 1;
        mov.b32 %r1, %laneid;
        mul.f32 %r3, 0f3F000000, 0f40800000;
        add.f32 %r4, %r3, %r3;
        add.s32 %r5, %r4, %r1;
        mov.b32 {%rs1, %rs2}, %r4;
        mov.b64 {%r6, %r7}, %rd1;
        mov.b64 {%r7, %r6}, %rd1;
        mov.b32 %r3, 0f41000000;
        add.f32 %r8, %r3, %r3;
        """
    )
    got = run(program, rd1=[5 << 32 | 3] * 32)
    assert got["r2"] == [2] * 32 and got["r1"] == LANES
    assert got["r4"] == [0x40800000] * 32
    assert got["r5"] == [0x40800000 + i for i in LANES]
    assert got["rs2"] == [0x4080] * 32
    assert got["r8"] == [0x41800000] * 32  # of the second %r3, which is read as a float like the first
    assert (got["r7"], got["r6"]) == ([3] * 32, [5] * 32)


def test_a_swap_reads_before_it_writes() -> None:
    program = translated("mov.b64 {%r1, %r2}, %rd1; mov.b64 %rd2, {%r2, %r1}; mov.b64 {%r3, %r4}, %rd2;")
    got = run(program, rd1=[5 << 32 | 3] * 32)
    assert (got["r3"], got["r4"]) == ([5] * 32, [3] * 32)
    assert execute("setp.eq.and.s32 %p1|%p2, %r1, 0, %p1", {"%p1": [True] * 32}, "%p1", "%p2") == [
        [True] * 32,
        [False] * 32,
    ]


@pytest.mark.parametrize("negated", [False, True])
def test_a_guard_keeps_the_lanes_that_it_excludes(negated: bool) -> None:
    guard = [i % 3 == 0 for i in LANES]
    given = {"%r0": [7] * 32, "%r1": LANES, "%p1": guard}
    text = f"@{'!' if negated else ''}%p1 add.s32 %r0, %r1, 100"
    want = [i + 100 if g != negated else 7 for i, g in zip(LANES, guard, strict=True)]
    assert execute(text, given, "%r0") == [want]
    mask = [i < 16 for i in LANES]
    masked = [w if m else 7 for w, m in zip(want, mask, strict=True)]
    assert execute(text, given, "%r0", mask=mask) == [masked]


def test_a_mask_keeps_other_lanes_of_every_destination() -> None:
    mask = [i % 2 == 0 for i in LANES]
    given = {"%rd1": [i << 32 | 1 for i in LANES], "%r1": [9] * 32, "%r2": [8] * 32}
    low, high = execute("mov.b64 {%r1, %r2}, %rd1", given, "%r1", "%r2", mask=mask)
    assert low == [1 if m else 9 for m in mask]
    assert high == [i if m else 8 for i, m in zip(LANES, mask, strict=True)]
    program = translated("add.s32 %r1, %r2, 1; add.s32 %r1, %r1, 1; add.s32 %r3, %r1, 1;")
    values = [np.zeros(32, DTYPES[kind]) for kind in program.kinds]
    before = values[program.index["%r1"]]
    program.steps[0].masked(values, [], np.array(mask))
    assert values[program.index["%r3"]].tolist() == [3 * m for m in mask]
    assert (before == 0).all()  # arrays are not changed in place


def test_addresses_of_variables_and_parameters() -> None:
    program = translated(
        "mov.b64 %rd1, second; mov.b32 %r1, first; mov.b64 %rd2, b; mov.b64 %rd3, second+16;",
        ".shared .align 16 .b8 first[40]; .shared .align 128 .b8 second[256];",
        ".param .u64 a, .param .align 64 .b8 b[128]",
    )
    assert program.shared == {"first": 1024, "second": 1152}
    got = run(program)
    assert (got["r1"][0], got["rd1"][0], got["rd3"][0]) == (1024, 1152, 1168)
    assert got["rd2"][0] % (1 << 20) == 64 and got["rd2"][0] > 1 << 40


def test_special_registers() -> None:
    got = run(translated("mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.y; cvt.u64.u32 %rd1, %nctaid.z;"))
    names = "%tid.x", "%ctaid.y", "%nctaid.z"
    assert [got["r1"][0], got["r2"][0], got["rd1"][0]] == [SPECIAL.index(name) for name in names]


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("mul24.lo.s32 %r1, %r2, %r3", "mul24 is not supported. Supported: .*add.*cvt.*ldmatrix.*wgmma"),
        ("mul.s16x2 %r1, %r2, %r3", r"\.s16x2 is not supported"),
        ("add.cc.s32 %r1, %r2, %r3", r"\.cc is not supported"),
        ("fma.rn.f64 %rd1, %rd2, %rd3, %rd4", r"\.f64 is not supported"),
        ("cvt.rn.satfinite.e2m1x2.f32 %rs1, %r2, %r3", "this conversion is not supported"),
        ("cvt.rn.f16x2.e4m3x2 %r1, %p1", "a register of p is read as u2"),
        ("mov.u32 %r1, %clock", "not supported"),
        ("and.b32 %rd1, %r2, %r3", "%rd1 has u8, the result is u4"),
        ("setp.maybe.s32 %p1, %r1, %r2", r"\.maybe is not supported"),
    ],
)
def test_what_is_not_known_is_refused_by_name_and_line(instruction: str, message: str) -> None:
    text = kernel(f"add.s32 %r1, %r1, 1;\n{instruction};")
    line = text[: text.index(instruction)].count("\n") + 1
    with pytest.raises(Unsupported, match=rf"(?s)PTX line {line}: {instruction}.*{message}"):
        translate(parse(text))
