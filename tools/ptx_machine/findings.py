"""What the machine reports: faults that end a run, and findings that do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.ptx_machine.syntax import Instruction

# Kinds of findings that do not say that the kernel is wrong.
INFORMATION = frozenset({"same value", "uninitialised operand", "undefined register"})
LONGEST = 120  # characters of an instruction in a report


class Fault(Exception):
    """The kernel faults, never ends, or does what the ISA leaves undefined: the run cannot go on."""


@dataclass(frozen=True)
class Finding:
    """A report.

    Attributes:
        kind: "race", "proxy" (a missing proxy fence), "barrier" (reused too early, or misused),
            "uninitialised", "exit" (before a copy is over), "inactive lane", "fence" (a missing wgmma.fence),
            "tensor map" (that the driver would refuse), or "fault". Kinds in `INFORMATION` do not say that
            the kernel is wrong: "same value" (several threads store one result), "uninitialised operand" (of
            a wgmma, whose rows may be unused) and "undefined register" (read, but never written: its value
            may not matter).
        message: a sentence.
        line: of the PTX, from 1; 0 if the report is about no instruction.
        text: the instruction.
        source: `file:line` of the program that the PTX was compiled from, or "".
        other_line: the PTX line of the other access of a race, or 0.
        other_source: of that line.
        count: how often it was seen.
    """

    kind: str
    message: str
    line: int = 0
    text: str = ""
    source: str = ""
    other_line: int = 0
    other_source: str = ""
    count: int = 1

    @property
    def error(self) -> bool:
        """Whether the kernel is wrong."""
        return self.kind not in INFORMATION

    def __str__(self) -> str:
        text = self.text if len(self.text) <= LONGEST else self.text[: LONGEST - 3] + "..."
        where = f" at PTX line {self.line}: {text}" if self.line else ""
        where += f" ({self.source})" if self.source else ""
        other = f"; other access at PTX line {self.other_line}" if self.other_line else ""
        other += f" ({self.other_source})" if self.other_source else ""
        times = f", {self.count} times" if self.count > 1 else ""
        return f"{self.kind}: {self.message}{where}{other}{times}"


class Findings:
    """Collects findings; the same one is counted."""

    def __init__(self, body: list[Instruction]) -> None:
        self.instructions = {x.line: x for x in body}
        self.found: dict[tuple[str, str, int, int], Finding] = {}

    def add(self, kind: str, message: str, line: int, other_line: int = 0) -> None:
        key = kind, message, line, other_line
        known = self.found.get(key)
        if known:
            self.found[key] = replace(known, count=known.count + 1)
            return
        at, other = self.instructions.get(line), self.instructions.get(other_line)
        self.found[key] = Finding(
            kind,
            message,
            line,
            at.text if at else "",
            at.source if at else "",
            other_line,
            other.source if other else "",
        )

    def all(self) -> list[Finding]:
        return list(self.found.values())
