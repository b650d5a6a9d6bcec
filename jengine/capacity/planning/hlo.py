"""Parses XLA's text of a compiled program: instructions with the sizes of their inputs and outputs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

BITS = {"pred": 8, "token": 0, "opaque": 0}  # other dtypes have the number of bits in their names
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:calls|body|to_apply)=%?([\w.\-]+)")
SLICES = ("gather", "dynamic-slice", "slice")  # read part of their first operand
UPDATES = ("scatter", "dynamic-update-slice")  # write part of their first operand in place
FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "opt-barrier")


@dataclass(frozen=True, slots=True)
class Array:
    """A result, or a part of one."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype)
        return self.size * (int(re.findall(r"\d+", self.dtype)[0]) if bits is None else bits) // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        results: the parts, for a tuple.
        operands: names.
        called: the computation of a fusion, or the body of a loop; empty if there is none.
        target: of a custom call.
        source: JAX's name of the origin, which includes the names of Pallas kernels.
        trips: number of iterations of a loop, if known.
    """

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: str
    target: str
    source: str
    trips: int | None

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.results)


@dataclass(frozen=True, slots=True)
class HloProgram:
    """Computations by name. Each maps names to instructions, in order. Called computations are separate
    entries.
    """

    name: str
    entry: str
    computations: dict[str, dict[str, Instruction]]

    def kernels(
        self, computation: str | None = None
    ) -> list[tuple[Instruction, int, dict[str, Instruction]]]:
        """Everything that runs on the device: (instruction, number of runs, its computation)."""
        found: list[tuple[Instruction, int, dict[str, Instruction]]] = []
        inside = self.computations[computation or self.entry]
        for one in inside.values():
            if one.opcode in ("while", "call", "async-start"):
                found += [
                    (inner, (one.trips or 1) * times, where)
                    for inner, times, where in self.kernels(one.called)
                ]
            elif wrapped := self._wrapped(one):
                found.append((wrapped, 1, self.computations[one.called]))
            elif one.opcode not in FREE and not one.opcode.endswith(("-done", "-update")):
                found.append((one, 1, inside))
        return found

    def _wrapped(self, one: Instruction) -> Instruction | None:
        """The custom call in a fusion that only slices its operands and results."""
        body = self.computations.get(one.called, {}) if one.opcode == "fusion" else {}
        return next((inner for inner in body.values() if inner.opcode == "custom-call"), None)

    def bytes_of(self, one: Instruction, inside: dict[str, Instruction]) -> int:
        """Minimum bytes that a kernel reads and writes: each array once; only the slices or updates of sliced
        or updated arrays."""
        operands = [inside[name] for name in one.operands if name in inside]
        if one.opcode in UPDATES:
            return sum(operand.bytes for operand in operands[1:]) * 2
        if one.opcode in SLICES:
            return 2 * one.bytes
        if one.opcode != "fusion":
            return one.bytes + sum(operand.bytes for operand in operands)
        body = self.computations[one.called]
        parameters = [inner for inner in body.values() if inner.opcode == "parameter"]
        read = written = 0
        in_place = [inner for inner in body.values() if inner.opcode in UPDATES]
        for parameter in parameters:
            uses = [inner for inner in body.values() if parameter.name in inner.operands]
            first = [
                use for use in uses if use.opcode in (*SLICES, *UPDATES) and use.operands[0] == parameter.name
            ]
            sliced = sum(use.bytes for use in first if use.opcode in SLICES)
            read += min(parameter.bytes, sliced) if len(first) == len(uses) else parameter.bytes
        kept = {update.results[0] for update in in_place}
        written += sum(array.bytes for array in one.results if array not in kept)
        written += sum(body[update.operands[-1]].bytes for update in in_place if update.operands[-1] in body)
        return read + written


def parse(text: str) -> HloProgram:
    """XLA's text of a compiled module."""
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
    trips = re.search(r'known_trip_count":\{"n":"(\d+)"', attributes)
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
        int(trips[1]) if trips else None,
    )


def _split(text: str) -> tuple[str, str]:
    """The content of the parentheses at the start of the text, and the text after them."""
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    return text, ""
