"""Parses XLA's text of a compiled program, to list its kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.\-]+)")
FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "opt-barrier")


@dataclass(frozen=True, slots=True)
class Array:
    """A result, or a part of one."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        results: the parts, for a tuple.
        operands: names.
        called: the computation of a fusion, or the body of a loop; empty if there is none.
        target: of a custom call.
        source: JAX's name of the origin, which includes the names of Pallas kernels.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: str
    target: str
    source: str


@dataclass(frozen=True, slots=True)
class HloProgram:
    """Computations by name. Each maps names to instructions, in order. Called computations are separate
    entries.
    """

    name: str
    entry: str
    computations: dict[str, dict[str, Instruction]]

    def kernels(self, computation: str | None = None) -> list[Instruction]:
        """Everything that runs on the device, in order; the body of a loop counts once."""
        found: list[Instruction] = []
        for instruction in self.computations[computation or self.entry].values():
            if instruction.opcode in ("while", "call", "async-start"):
                found += self.kernels(instruction.called)
            elif wrapped := self._wrapped(instruction):
                found.append(wrapped)
            elif instruction.opcode not in FREE and not instruction.opcode.endswith(("-done", "-update")):
                found.append(instruction)
        return found

    def _wrapped(self, one: Instruction) -> Instruction | None:
        """The custom call in a fusion that only slices its operands and results."""
        body = self.computations.get(one.called, {}) if one.opcode == "fusion" else {}
        return next((inner for inner in body.values() if inner.opcode == "custom-call"), None)


def parse(text: str | None) -> HloProgram:
    """XLA's text of a compiled module."""
    assert text is not None
    computations: dict[str, dict[str, Instruction]] = {}
    entry, inside = "", dict[str, Instruction]()
    name = re.match(r"HloModule ([\w.\-]+)", text)
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            inside = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif (match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line)) and (
            one := _instruction(match[1], match[2])
        ):
            inside[one.name] = one
    return HloProgram(name[1] if name else "", entry, computations)


def _instruction(name: str, rest: str) -> Instruction | None:
    kind, rest = _split(rest) if rest.startswith("(") else rest.split(" ", 1)
    match = re.match(r"\s*([\w\-]+)(\(.*)$", rest)
    if match is None:
        return None
    operands, attributes = _split(match[2])
    called = CALLED.search(attributes)
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    source = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name,
        match[1],
        tuple(
            Array(dtype, tuple(map(int, filter(None, shape.split(",")))))
            for dtype, shape in ARRAY.findall(kind)
        ),
        tuple(re.findall(r"%([\w.\-]+)", operands)),
        called[1] if called else "",
        target[1] if target else "",
        source[1] if source else "",
    )


def _split(text: str) -> tuple[str, str]:
    """The content of the parentheses at the start of the text, and the text after them."""
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""
