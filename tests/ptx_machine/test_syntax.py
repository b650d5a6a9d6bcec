"""The parser."""

from __future__ import annotations

import pytest

from tests.ptx_machine.one_instruction import kernel
from tools.ptx_machine.operands import Imm, Mem, Not, Pair, Reg, Sym, registers
from tools.ptx_machine.syntax import parse

TEXT = """\
//
.version 9.0
.target sm_90a
.address_size 64

.extern .shared .align 1024 .b8 pool[];
.visible .entry some_kernel(
	.param .u64 .ptr .align 256 some_kernel_param_0,
	.param .u32 some_kernel_param_1,
	.param .align 64 .b8 some_kernel_param_2[256]
)
.maxntid 384, 1, 1
.minnctapersm 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<4>;
$L__func_begin0:
	.loc	1 12 0
	// demoted variable
	.shared .align 16 .b8 buffer[48];
	ld.param::entry.b64 	%rd1, [some_kernel_param_0];
	ld.param.b32 	%r1, [some_kernel_param_2+8];
	.loc	1 13 4, function_name $L__info_string0, inlined_at 1 20 3
	mov.b64 	%rd2, some_kernel_param_2;
	elect.sync 	%r2|%p1, -1;
	elect.sync 	_|%p2, -1;
	// begin inline asm
	{
	.reg .pred       P1;
	.reg .b32 s<2>;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
	@P1 bra DONE;
	prmt.b32 s1, %r1, 0x43, 16704;
	bra LAB_WAIT;
	DONE:
	}

	// end inline asm
	.loc	2 0 0
	{ .reg .pred P1; setp.eq.and.s32 P1, %r1, 0, !%p1; @!P1 bra $L__BB0_1; }
	@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1],
		[%rd2, {%r2,%r3}], [%r4];
	st.shared.v2.b32 [%r1+-16], {%r3, 0f3F800000};
	mov.b64 %rd3, buffer+32; /* two
	lines */ mov.b32 %r7, 017;
$L__BB0_1:
	ret;
$L__tmp1:
}
	.section	.debug_macinfo	{	}
	.file	1 "/some/where.py"
	.file	2 "/else.py"
"""


def test_a_module() -> None:
    made = parse(TEXT)
    assert (made.name, made.target, made.threads) == ("some_kernel", "sm_90a", (384, 1, 1))
    assert made.params == {
        "some_kernel_param_0": (0, 8),
        "some_kernel_param_1": (8, 4),
        "some_kernel_param_2": (64, 256),
    }
    assert made.shared == {"pool": (1024, 0), "buffer": (16, 48)}
    by_op: dict[str, list[object]] = {}
    for ins in made.body:
        by_op.setdefault(ins.parts[0], []).append(ins.args)
        assert TEXT.splitlines()[ins.line - 1].replace("\t", " ").find(ins.text.split()[0]) >= 0
    assert by_op["ld"][1] == [Reg("%r1"), Mem(Sym("some_kernel_param_2"), 8)]
    assert by_op["elect"] == [[Pair(Reg("%r2"), Reg("%p1")), Imm(-1)], [Pair(None, Reg("%p2")), Imm(-1)]]
    assert by_op["prmt"][0][1:] == [Reg("%r1"), Imm(0x43), Imm(16704)]
    assert by_op["cp"] == [[Mem(Reg("%r1")), Mem(Reg("%rd2"), 0, (Reg("%r2"), Reg("%r3"))), Mem(Reg("%r4"))]]
    assert by_op["st"] == [[Mem(Reg("%r1"), -16), (Reg("%r3"), Imm(0x3F800000, 32))]]
    assert by_op["mov"][1:] == [[Reg("%rd3"), Sym("buffer", 32)], [Reg("%r7"), Imm(0o17)]]
    assert by_op["setp"][0][3] == Not(Reg("%p1"))


def test_scopes_have_their_own_registers_and_labels() -> None:
    made = parse(TEXT)
    wait, compare = (next(i for i in made.body if i.parts[0] == op) for op in ("mbarrier", "setp"))
    assert wait.args[0] != compare.args[0]
    assert {made.registers[ins.args[0].name] for ins in (wait, compare)} == {"p"}
    done, back, out = (ins for ins in made.body if ins.parts[0] == "bra")
    assert done.guard == wait.args[0] and not done.negated
    assert out.guard == compare.args[0] and out.negated
    ends = [made.labels[ins.args[0].name] for ins in (done, back, out)]
    assert [made.body[at].parts[0] for at in ends] == ["setp", "mbarrier", "ret"]
    assert made.labels["$L__tmp1"] == len(made.body)


def test_where_an_instruction_comes_from() -> None:
    made = parse(TEXT)
    sources = {ins.op: ins.source for ins in made.body}
    assert sources["ld.param.b32"] == "/some/where.py:12"
    assert sources["setp.eq.and.s32"] == "/some/where.py:13"  # a line 0 says nothing
    text = str(made.body[0])
    assert text == f"PTX line {made.body[0].line}: {made.body[0].text} (/some/where.py:12)"


def test_registers_of_operands() -> None:
    operand = Mem(Reg("%rd2"), 0, (Reg("%r2"), Imm(3)))
    assert [*registers(operand)] == [Reg("%rd2"), Reg("%r2")]
    assert [*registers((Not(Reg("%p1")), Pair(None, Reg("%p2")), None, Imm(1)))] == [Reg("%p1"), Reg("%p2")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r1, %r2, %nothing;", "operand %nothing"),
        (".reg .b128 %q<3>;", "registers of type .b128"),
        ("add.s32 %r1, %r2, [%r3, %r4];", r"operand \[%r3, %r4\]"),
        ("mov.b32 %r1, %r2", "has no end"),
        (".local .b8 stack[16];", "not supported"),
    ],
)
def test_what_is_no_ptx_is_named_with_its_line(body: str, message: str) -> None:
    text = kernel(body)
    if "no end" in message:
        text = text[: text.index("ret;")]
    line = text[: text.index(body)].count("\n") + 1
    with pytest.raises(SyntaxError, match=rf"PTX line {line}: .*{message}"):
        parse(text)


def test_modules_with_more_than_a_kernel_are_refused() -> None:
    with pytest.raises(SyntaxError, match=r"line \d+: a second .entry"):
        parse(kernel("") + ".visible .entry other() { ret; }")
    with pytest.raises(SyntaxError, match=r"PTX line 1: .global .b8 table\[4\]"):
        parse(".global .b8 table[4] = {0, 1, 2, 3};\n" + kernel(""))
    with pytest.raises(SyntaxError, match=r"no .entry"):
        parse(".version 9.0")
