"""What arithmetic instructions compute, as NumPy expressions (PTX ISA, "Instruction set").

A rule gets an instruction and its operands, and returns its assignments: destination, type of the
expression's array, expression. Types: u1 to u8, i1 to i8, f2 to f8, and p for predicates (bool). Registers
hold unsigned numbers of their width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

import numpy as np

from tools.ptx_machine.numbers import Array
from tools.ptx_machine.operands import Imm, Operand, Pair
from tools.ptx_machine.syntax import Instruction


class Unsupported(NotImplementedError):
    """An instruction that the machine does not know."""


class Operands(Protocol):
    """Expressions of operands."""

    def use(self, operand: Operand, type: str) -> str:
        """An operand as an array of the type; of a wider register, its lowest bits."""

    def array(self, values: Array) -> str:
        """A constant array."""

    def kind(self, operand: Operand) -> str:
        """The type of the unsigned numbers in a register."""


type Assignment = tuple[Operand, str, str]
type Rule = Callable[[Instruction, Operands], list[Assignment]]
RULES: dict[str, Rule] = {}
SIGNS = {"add": "+", "sub": "-", "mul": "*"}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_COMPARISONS = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
DIRECTED = ("rz", "rm", "rp")
PACKED = ("f16x2", "bf16x2")
HALVES = ("f16", "bf16", *PACKED)
INTEGER_PAIRS = ("u16x2", "s16x2")


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def unsigned(t: str) -> str:
    """Type of the unsigned numbers for a PTX type: u4 for s32."""
    if t == "pred":
        return "p"
    if t in ("f16x2", "bf16x2"):
        return "u4"
    if t == "bf16":
        return "u2"
    if not (match := re.fullmatch(r"[busf](8|16|32|64)", t)):
        raise Unsupported(f".{t} is not supported")
    return f"u{int(match[1]) // 8}"


def typed(t: str) -> str:
    """Type of the numbers for a PTX type: i4 for s32. bfloat16 is its bits."""
    if t[0] in "sf" and t not in PACKED:
        return ("i" if t[0] == "s" else "f") + str(int(t[1:]) // 8)
    return unsigned(t)


def bits_of(t: str) -> int:
    return 8 * int(unsigned(t)[1:])


def known(ins: Instruction, *modifiers: str) -> None:
    """Refuses modifiers that a rule does not know; the last part is the type."""
    for part in ins.parts[1:-1]:
        if part not in modifiers:
            raise Unsupported(f".{part} is not supported")


def one_of(ins: Instruction, types: tuple[str, ...] | str) -> str:
    t = ins.parts[-1]
    if t not in (types.split() if isinstance(types, str) else types):
        raise Unsupported(f".{t} is not supported")
    return t


def float32(ins: Instruction, use: Operands, x: Operand) -> str:
    """A float32 operand, flushed if the instruction says so."""
    return f"flush({use.use(x, 'f4')})" if "ftz" in ins.parts else use.use(x, "f4")


def finish(ins: Instruction, expression: str) -> str:
    """The modifiers of a float32 result."""
    if "sat" in ins.parts:
        expression = f"saturate({expression})"
    return f"flush({expression})" if "ftz" in ins.parts else expression


def halves(ins: Instruction, use: Operands, name: str) -> list[Assignment]:
    """An instruction on 16-bit floats, or on pairs of them."""
    t = ins.parts[-1]
    if t in PACKED:
        given = ", ".join(f"{use.use(x, 'u4')}.view(u2)" for x in ins.args[1:])
        return [(ins.args[0], "u4", f"half({name!r}, {t[:-2]!r}, {given}).view(u4)")]
    given = ", ".join(use.use(x, "u2") for x in ins.args[1:])
    return [(ins.args[0], "u2", f"half({name!r}, {t!r}, {given})")]


def integer_pairs(ins: Instruction, use: Operands, expression: str) -> list[Assignment]:
    """An instruction on pairs of 16-bit integers. expression: of x and y."""
    known(ins)
    d, a, b = ins.args
    x, y = (f"{use.use(x, 'u4')}.view({ins.parts[-1][0].replace('s', 'i')}2)" for x in (a, b))
    return [(d, "u4", f"({expression.format(x=x, y=y)}).view(u4)")]


def float_pairs(ins: Instruction, use: Operands, expression: str) -> list[Assignment]:
    """An instruction on pairs of float32 numbers (Blackwell). expression: of the operands, by number."""
    known(ins, "rn", "ftz")
    given = [f"{use.use(x, 'u8')}.view(f4)" for x in ins.args[1:]]
    given = [f"flush({x})" for x in given] if "ftz" in ins.parts else given
    return [(ins.args[0], "u8", f"({finish(ins, expression.format(*given))}).view(u8)")]


def is_mixed(ins: Instruction) -> bool:
    """Whether 16-bit floats are added to, or multiplied and added to, a float32 (Blackwell)."""
    return ins.parts[-1] in ("f16", "bf16") and ins.parts[-2] == "f32"


def widened(ins: Instruction, use: Operands, x: Operand) -> str:
    """A 16-bit float of such an instruction as float32."""
    known(ins, "rn", "f32")
    return f"from_bf16({use.use(x, 'u2')})" if ins.parts[-1] == "bf16" else f"{use.use(x, 'f2')}.astype(f4)"


@rule("add", "sub", "mul")
def _sum(ins: Instruction, use: Operands) -> list[Assignment]:
    op, t, (d, a, b) = ins.parts[0], ins.parts[-1], ins.args
    if is_mixed(ins) and op != "mul":
        return [(d, "f4", f"canonical({widened(ins, use, a)} {SIGNS[op]} {use.use(b, 'f4')})")]
    if t in HALVES:
        known(ins, "rn")
        return halves(ins, use, op)
    if t in INTEGER_PAIRS and op != "mul":
        return integer_pairs(ins, use, f"{{x}} {SIGNS[op]} {{y}}")
    if t == "f64":
        known(ins, "rn")
        return [(d, "f8", f"{use.use(a, 'f8')} {SIGNS[op]} {use.use(b, 'f8')}")]
    if t == "f32x2":
        return float_pairs(ins, use, f"canonical({{0}} {SIGNS[op]} {{1}})")
    if t == "f32":
        known(ins, "rn", "ftz", "sat", *DIRECTED)
        x, y = float32(ins, use, a), float32(ins, use, b)
        mode = next((m for m in DIRECTED if m in ins.parts), None)
        out = f"directed({op!r}, {x}, {y}, {mode!r})" if mode else f"canonical({x} {SIGNS[op]} {y})"
        return [(d, "f4", finish(ins, out))]
    if op == "mul":
        return [(d, *product(ins, use))]
    if "sat" in ins.parts:
        known(ins, "sat")
        one_of(ins, "s32")
        x, y = use.use(a, "i4"), use.use(b, "i4")
        return [(d, "i4", f"saturated_sum({x}, {y}, {1 if op == 'add' else -1})")]
    known(ins)
    u = unsigned(t)
    return [(d, u, f"{use.use(a, u)} {SIGNS[op]} {use.use(b, u)}")]


def product(ins: Instruction, use: Operands) -> tuple[str, str]:
    """A product of integers, for mul and mad."""
    known(ins, "wide", "lo", "hi")
    t = one_of(ins, "s16 u16 s32 u32 s64 u64")
    a, b = ins.args[1:3]
    i, u = typed(t), unsigned(t)
    if "wide" in ins.parts:
        wide = f"{i[0]}{2 * int(i[1:])}"
        return wide, f"{use.use(a, i)}.astype({wide}) * {use.use(b, i)}"
    if "hi" in ins.parts:
        return i, f"high_product({use.use(a, i)}, {use.use(b, i)})"
    return u, f"{use.use(a, u)} * {use.use(b, u)}"


@rule("mad", "fma")
def _multiply_add(ins: Instruction, use: Operands) -> list[Assignment]:
    t, (d, a, b, c) = ins.parts[-1], ins.args
    if is_mixed(ins):
        return [(d, "f4", f"fma32({widened(ins, use, a)}, {widened(ins, use, b)}, {use.use(c, 'f4')})")]
    if t in HALVES:
        known(ins, "rn")
        return halves(ins, use, "fma")
    if t == "f32x2":
        return float_pairs(ins, use, "fma32({0}, {1}, {2})")
    if t == "f32":
        known(ins, "rn", "ftz", "sat", *DIRECTED)
        given = ", ".join(float32(ins, use, x) for x in (a, b, c))
        mode = next((m for m in DIRECTED if m in ins.parts), None)
        out = f"fma32_directed({given}, {mode!r})" if mode else f"fma32({given})"
        return [(d, "f4", finish(ins, out))]
    if t == "f64":
        raise Unsupported(".f64 is not supported")
    kind, expression = product(ins, use)
    size = kind[1:]
    add = use.use(c, f"u{size}")
    view = "" if kind[0] == "u" else f".view(u{size})"
    return [(d, f"u{size}", f"({expression}){view} + {add}")]


@rule("div")
def _divide(ins: Instruction, use: Operands) -> list[Assignment]:
    t, (d, a, b) = ins.parts[-1], ins.args
    if t == "f32":
        known(ins, "rn", "full", "approx", "ftz")
        x, y = float32(ins, use, a), float32(ins, use, b)
        out = f"divide_approx({x}, {y})" if "approx" in ins.parts else f"canonical({x} / {y})"
        return [(d, "f4", finish(ins, out))]
    known(ins)
    i = typed(one_of(ins, "s16 u16 s32 u32 s64 u64"))
    return [(d, i, f"divide({use.use(a, i)}, {use.use(b, i)})")]


@rule("rem")
def _remainder(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    i = typed(one_of(ins, "s16 u16 s32 u32 s64 u64"))
    d, a, b = ins.args
    return [(d, i, f"remainder({use.use(a, i)}, {use.use(b, i)})")]


@rule("min", "max")
def _extreme(ins: Instruction, use: Operands) -> list[Assignment]:
    op, t, (d, a, b) = ins.parts[0], ins.parts[-1], ins.args
    nan = "NaN" in ins.parts
    if t in HALVES:
        known(ins, "NaN")
        return halves(ins, use, f"{op}.NaN" if nan else op)
    if t in INTEGER_PAIRS:
        return integer_pairs(ins, use, f"np.{op}imum({{x}}, {{y}})")
    if t in ("f32", "f64"):
        known(ins, "NaN", "ftz")
        x, y = (float32(ins, use, x) if t == "f32" else use.use(x, "f8") for x in (a, b))
        return [(d, typed(t), f"extreme({x}, {y}, {op == 'max'}, {nan})")]
    known(ins, *["relu"] * (t == "s32"))
    i = typed(one_of(ins, "s16 u16 s32 u32 s64 u64"))
    result = f"np.{op}imum({use.use(a, i)}, {use.use(b, i)})"
    return [(d, i, f"np.maximum({result}, 0)" if "relu" in ins.parts else result)]


@rule("neg", "abs")
def _sign(ins: Instruction, use: Operands) -> list[Assignment]:
    op, t, (d, a) = ins.parts[0], ins.parts[-1], ins.args
    known(ins, "ftz")
    if t in HALVES or t in ("f32", "f64"):  # of a NaN PTX leaves the payload open
        u = unsigned(t)
        sign = 1 << bits_of(t) - 1 | (0x8000 if t in PACKED else 0)
        x = use.use(a, u) if "ftz" not in ins.parts else f"flush({use.use(a, 'f4')}).view(u4)"
        return [(d, u, f"{x} ^ {u}({sign:#x})" if op == "neg" else f"{x} & ~{u}({sign:#x})")]
    i = typed(one_of(ins, "s16 s32 s64"))
    return [(d, i, f"-{use.use(a, i)}" if op == "neg" else f"np.abs({use.use(a, i)})")]


@rule("copysign")
def _copysign(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    f = typed(one_of(ins, "f32 f64"))
    d, sign, size = ins.args
    return [(d, f, f"np.copysign({use.use(size, f)}, {use.use(sign, f)})")]


@rule("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")
def _function(ins: Instruction, use: Operands) -> list[Assignment]:
    op, (d, a) = ins.parts[0], ins.args
    known(ins, "approx", "ftz", "rn")
    if ins.parts[-1] in HALVES and op in ("ex2", "tanh"):
        return halves(ins, use, op)
    one_of(ins, "f32")
    return [(d, "f4", finish(ins, f"approx({op!r}, {float32(ins, use, a)})"))]


@rule("and", "or", "xor")
def _bitwise(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    u = unsigned(one_of(ins, "pred b16 b32 b64"))
    d, a, b = ins.args
    return [(d, u, f"{use.use(a, u)} {BITWISE[ins.parts[0]]} {use.use(b, u)}")]


@rule("not", "cnot")
def _not(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    u = unsigned(one_of(ins, "pred b16 b32 b64"))
    d, a = ins.args
    if ins.parts[0] == "cnot":
        return [(d, u, f"({use.use(a, u)} == 0).astype({u})")]
    return [(d, u, f"~{use.use(a, u)}")]


@rule("shl", "shr")
def _shift(ins: Instruction, use: Operands) -> list[Assignment]:
    op, (d, a, n) = ins.parts[0], ins.args
    known(ins)
    t = one_of(ins, "b16 b32 b64" if op == "shl" else "b16 b32 b64 u16 u32 u64 s16 s32 s64")
    i = typed(t)
    if isinstance(n, Imm) and 0 <= n.bits < bits_of(t):
        return [(d, i, f"{use.use(a, i)} {'<<' if op == 'shl' else '>>'} {use.use(n, i)}")]
    return [(d, i, f"{op}({use.use(a, i)}, {use.use(n, 'u4')})")]


@rule("shf")
def _funnel(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins, "l", "r", "clamp", "wrap")
    one_of(ins, "b32")
    given = ", ".join(use.use(x, "u4") for x in ins.args[1:])
    return [(ins.args[0], "u4", f"funnel({given}, {'l' in ins.parts}, {'wrap' in ins.parts})")]


@rule("bfe")
def _extract(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    i = typed(one_of(ins, "u32 s32 u64 s64"))
    d, a, at, n = ins.args
    return [(d, i, f"bfe({use.use(a, i)}, {use.use(at, 'u4')}, {use.use(n, 'u4')})")]


@rule("bfi")
def _insert(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    u = unsigned(one_of(ins, "b32 b64"))
    d, a, b, at, n = ins.args
    return [(d, u, f"bfi({use.use(a, u)}, {use.use(b, u)}, {use.use(at, 'u4')}, {use.use(n, 'u4')})")]


@rule("lop3")
def _lookup(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    one_of(ins, "b32")
    d, a, b, c, table = ins.args
    if not isinstance(table, Imm):
        raise Unsupported("the table must be a constant")
    given = ", ".join(use.use(x, "u4") for x in (a, b, c))
    return [(d, "u4", f"lop3({given}, {table.bits})")]


@rule("prmt")
def _permute(ins: Instruction, use: Operands) -> list[Assignment]:
    mode = ins.parts[2] if len(ins.parts) > 2 else ""
    if ins.parts[1] != "b32" or mode not in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        raise Unsupported("not supported")
    d, a, b, selector = ins.args
    x, y = use.use(a, "u4"), use.use(b, "u4")
    if isinstance(selector, Imm) and not mode and not selector.bits & 0x8888:
        picks = use.array(np.array([selector.bits >> 4 * i & 7 for i in range(4)]))
        return [(d, "u4", f"prmt_constant({x}, {y}, {picks})")]
    return [(d, "u4", f"prmt({x}, {y}, {use.use(selector, 'u4')}, {mode!r})")]


@rule("popc", "clz", "brev", "bfind")
def _count(ins: Instruction, use: Operands) -> list[Assignment]:
    op, (d, a) = ins.parts[0], ins.args
    known(ins, *(["shiftamt"] if op == "bfind" else []))
    t = one_of(ins, "u32 s32 u64 s64" if op == "bfind" else "b32 b64")
    out = unsigned(t) if op == "brev" else "u4"
    return [(d, out, f"{op}({use.use(a, typed(t))}{', True' if 'shiftamt' in ins.parts else ''})")]


@rule("selp")
def _select(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    d, a, b, p = ins.args
    u = unsigned(ins.parts[-1])
    return [(d, u, f"np.where({use.use(p, 'p')}, {use.use(a, u)}, {use.use(b, u)})")]


@rule("setp")
def _compare(ins: Instruction, use: Operands) -> list[Assignment]:
    t, name = ins.parts[-1], ins.parts[1]
    combined = next((p for p in ins.parts[2:-1] if p in BITWISE), None)
    known(ins, name, "ftz", *BITWISE)
    target, a, b = ins.args[:3]
    if t in ("f16", "bf16"):
        x, y = (f"from_bf16({use.use(x, 'u2')})" if t == "bf16" else use.use(x, "f2") for x in (a, b))
    elif t == "f32":
        x, y = float32(ins, use, a), float32(ins, use, b)
    elif t in PACKED:
        raise Unsupported(f".{t} is not supported")
    else:
        x, y = use.use(a, typed(t)), use.use(b, typed(t))
    if t[0] == "f" or t == "bf16":
        out = _float_comparison(ins, name, x, y)
    elif (sign := (COMPARISONS | UNSIGNED_COMPARISONS).get(name)) is not None:
        out = f"({x} {sign} {y})"
    else:
        raise Unsupported(f".{name} is not supported")
    targets = (
        [(target.first, out), (target.second, f"~{out}")] if isinstance(target, Pair) else [(target, out)]
    )
    if combined:
        other = use.use(ins.args[3], "p")
        targets = [(d, f"{e} {BITWISE[combined]} {other}") for d, e in targets]
    return [(d, "p", e) for d, e in targets if d is not None]


def _float_comparison(ins: Instruction, name: str, x: str, y: str) -> str:
    if name in ("num", "nan"):
        return f"({'~' if name == 'num' else ''}unordered({x}, {y}))"
    ordered = name.removesuffix("u") if name.endswith("u") else name
    if ordered not in COMPARISONS:
        raise Unsupported(f".{name} is not supported")
    out = f"({x} {COMPARISONS[ordered]} {y})"  # with a NaN false, but != is true
    if name.endswith("u") and ordered != "ne":
        return f"({out} | unordered({x}, {y}))"
    return f"({out} & ~unordered({x}, {y}))" if name == "ne" else out


@rule("mov")
def _move(ins: Instruction, use: Operands) -> list[Assignment]:
    known(ins)
    t, (d, a) = ins.parts[-1], ins.args
    u = unsigned(t)
    if isinstance(d, tuple):  # the lowest bits first
        half = bits_of(t) // len(d)
        small, wide = f"u{half // 8}", use.use(a, u)
        parts = [f"{wide}.astype({small})"]
        parts += [f"({wide} >> {u}({half * i})).astype({small})" for i in range(1, len(d))]
        return [(x, small, part) for x, part in zip(d, parts, strict=True) if x is not None]
    if isinstance(a, tuple):
        half = bits_of(t) // len(a)
        if len(a) == 2 and half == 16:
            low, high = (use.use(x, "u2") for x in a)
            return [(d, u, f"packed({low}, {high})")]
        terms = [f"{use.use(x, f'u{half // 8}')}.astype({u})" for x in a]
        shifted = [term if i == 0 else f"({term} << {u}({half * i}))" for i, term in enumerate(terms)]
        return [(d, u, " | ".join(shifted))]
    return [(d, u, use.use(a, u))]
