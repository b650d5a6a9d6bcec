"""Operands of PTX instructions, as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
FLOATS = ((re.compile(r"0[fF]([0-9a-fA-F]{8})"), 32), (re.compile(r"0[dD]([0-9a-fA-F]{16})"), 64))


@dataclass(frozen=True)
class Reg:
    """A register, or a special register such as %tid.x. Names in inner scopes end with @ and the scope."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A constant.

    Attributes:
        bits: an integer of any size and sign, to be cut to the type of its use; or a float's bits.
        width: of a float's bits, 32 or 64; 0 for integers.
    """

    bits: int
    width: int = 0


@dataclass(frozen=True)
class Sym:
    """The address of a variable or parameter, or a label."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Not:
    """A predicate, negated: !%p1."""

    operand: Reg


@dataclass(frozen=True)
class Pair:
    """Two destinations: %r1|%p1. None stands for `_`."""

    first: Reg | None
    second: Reg | None


@dataclass(frozen=True)
class Mem:
    """A place in memory: [base + offset], or [base, {coordinates}] of a tensor map."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: tuple[Reg | Imm, ...] | None = None


type Scalar = Reg | Imm | Sym | Not | Pair | Mem | None
type Operand = Scalar | tuple[Scalar, ...]


def registers(operand: Operand) -> Iterator[Reg]:
    """All registers that an operand names, also those in addresses."""
    match operand:
        case Reg():
            yield operand
        case tuple():
            for part in operand:
                yield from registers(part)
        case Not():
            yield operand.operand
        case Pair():
            yield from registers((operand.first, operand.second))
        case Mem():
            yield from registers((operand.base, *(operand.coords or ())))


def split(raw: str) -> list[str]:
    """Cuts a list of operands at the commas outside of braces and brackets."""
    out, depth, start = [], 0, 0
    for i, c in enumerate(raw):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            out.append(raw[start:i].strip())
            start = i + 1
    last = raw[start:].strip()
    return [*out, last] if last else out


def constant(raw: str) -> Imm | None:
    """A literal, or None if the text is none."""
    if INTEGER.fullmatch(raw):
        digits = raw.rstrip("U")
        octal = re.fullmatch(r"(-?)0(\d+)", digits)  # as in C
        return Imm(int(octal[1] + octal[2], 8) if octal else int(digits, 0))
    for pattern, width in FLOATS:
        if match := pattern.fullmatch(raw):
            return Imm(int(match[1], 16), width)
    return None
