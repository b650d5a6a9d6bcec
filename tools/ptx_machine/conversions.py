"""What `cvt` and `cvta` compute, as NumPy expressions (PTX ISA, "cvt")."""

from __future__ import annotations

from tools.ptx_machine.rules import DIRECTED, PACKED, Assignment, Operands, Unsupported, rule, typed
from tools.ptx_machine.syntax import Instruction

EIGHT = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}
INTEGERS = {f"{sign}{n}" for sign in "su" for n in (8, 16, 32, 64)}
FLOATS = {"f16", "bf16", "f32", "f64"}
WHOLE = ("rni", "rzi", "rmi", "rpi")
# Generic addresses of shared memory and parameters begin here; those of global memory are smaller.
GENERIC_SHARED = 0x7000_0000_0000
GENERIC_PARAM = 0x5000_0000_0000


@rule("cvta")
def _address(ins: Instruction, use: Operands) -> list[Assignment]:
    d, a = ins.args
    known = {"to", "global", "shared", "shared::cta", "param", "param::entry", "u64"}
    if not known.issuperset(ins.parts[1:]):
        raise Unsupported("not supported")
    x = use.use(a, "u8")
    # parameters have their generic address from the start
    if any(part.startswith("shared") for part in ins.parts):
        x += f" {'-' if 'to' in ins.parts else '+'} u8({GENERIC_SHARED})"
    return [(d, "u8", x)]


@rule("cvt")
def _convert(ins: Instruction, use: Operands) -> list[Assignment]:
    to, of = ins.parts[-2:]
    modifiers = set(ins.parts[1:-2])
    rounding = next((m for m in ins.parts if m in ("rn", *DIRECTED, *WHOLE)), "")
    rest = modifiers - {rounding}
    d, *given = ins.args
    if to in PACKED and of == "f32" and rest <= {"relu"}:
        high, low = (_halved(use.use(x, "f4"), to[:-2], rounding, rest) for x in given)
        return [(d, "u4", f"packed({low}, {high})")]
    if to in EIGHT and rest <= {"satfinite", "relu"} and "satfinite" in rest and rounding == "rn":
        if of in PACKED:
            wide = f"{use.use(given[0], 'u4')}.view(u2)"
            wide = f"from_bf16({wide})" if of == "bf16x2" else f"{wide}.view(f2)"
            return [(d, "u2", f"to_eight_bits({_relu(wide, rest)}, {EIGHT[to]!r}).view(u2)")]
        if of == "f32":
            high, low = (
                f"to_eight_bits({_relu(use.use(x, 'f4'), rest)}, {EIGHT[to]!r}).astype(u2)" for x in given
            )
            return [(d, "u2", f"({low} | ({high} << u2(8)))")]
    if to == "f16x2" and of in EIGHT and rest <= {"relu"}:
        narrow = f"from_eight_bits({use.use(given[0], 'u2')}.view(u1), {EIGHT[of]!r})"
        return [(d, "u4", f"{_relu(narrow, rest)}.view(u4)")]
    if to in FLOATS | INTEGERS and of in FLOATS | INTEGERS and len(given) == 1:
        scalar = _scalar(ins, use, to, of, rounding, rest)
        if scalar is not None:
            return [(d, *scalar)]
    raise Unsupported("this conversion is not supported")


def _relu(expression: str, modifiers: set[str]) -> str:
    return f"relu({expression})" if "relu" in modifiers else expression


def _halved(x: str, to: str, rounding: str, modifiers: set[str]) -> str:
    """float32 or float64 to the bits of a 16-bit float."""
    x = _relu(x, modifiers)
    return f"to_bf16({x}, {rounding!r})" if to == "bf16" else f"to_f16({x}, {rounding!r}).view(u2)"


def _scalar(
    ins: Instruction, use: Operands, to: str, of: str, rounding: str, modifiers: set[str]
) -> tuple[str, str] | None:
    """Type and expression of one number; None if the modifiers are not supported."""
    [a] = ins.args[1:]
    register = use.kind(ins.args[0])
    x = use.use(a, typed(of))
    if of in INTEGERS:
        if to in INTEGERS:
            if modifiers - {"sat"} or rounding:
                return None
            changed = f"clamped({x}, {typed(to)})" if modifiers else f"{x}.astype({typed(to)})"
            return _widened(changed, to, register)
        if modifiers or rounding not in ("rn", *DIRECTED):
            return None
        if to == "f64" and of not in ("s64", "u64"):
            return "f8", f"{x}.astype(f8)"
        if of in ("s64", "u64") and (rounding != "rn" or to not in ("f32", "f64")):
            return None  # float64 does not hold them
        if to == "f32":
            near = f"{x}.astype(f4)"  # to nearest
            return "f4", near if rounding == "rn" else f"rounded({x}.astype(f8), f4, {rounding!r})"
        if to == "f64":
            return "f8", f"{x}.astype(f8)"
        return "u2", _halved(f"{x}.astype(f8)", to, rounding, set())
    wide = f"from_bf16({x})" if of == "bf16" else x
    if "ftz" in modifiers and of == "f32":
        wide = f"flush({wide})"
    if to in INTEGERS:
        if modifiers - {"ftz", "sat"} or rounding not in WHOLE:
            return None
        large = "f64" in (of, to) or to in ("s64", "u64")
        return _widened(f"to_integer({wide}, {typed(to)}, {rounding!r}, {large})", to, register)
    if modifiers - {"ftz", "sat", "relu"}:
        return None
    if "sat" in modifiers:
        wide = f"saturate({wide})"
    wide = _relu(wide, modifiers)
    if rounding in WHOLE:
        if to != of or to not in ("f32", "f64"):
            return None
        wide = f"WHOLE[{rounding!r}]({wide})"
    if to in ("f16", "bf16"):
        source = wide if of in ("f32", "f64") else f"{wide}.astype(f4)"
        return "u2", _halved(source, to, rounding or "rn", set())
    if to == "f64":
        return "f8", f"{wide}.astype(f8)"
    narrowed = (
        f"rounded({wide}, f4, {rounding!r})" if of == "f64" else wide if of == "f32" else f"{wide}.astype(f4)"
    )
    flushed = f"flush({narrowed})" if "ftz" in modifiers else narrowed
    return "f4", f"canonical({flushed})"


def _widened(expression: str, to: str, register: str) -> tuple[str, str]:
    """An integer in a register that may be wider: extended by its sign."""
    if typed(to)[1:] == register[1:]:
        return typed(to), expression
    wide = typed(to)[0] + register[1:]
    return wide, f"{expression}.astype({wide})"
