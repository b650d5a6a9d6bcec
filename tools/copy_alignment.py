"""Checks whether the bulk copies in a kernel's PTX are aligned in shared memory as CUDA requires.

A copy with a tensor map (`cp.async.bulk.tensor`) needs 128 bytes, a plain one (`cp.async.bulk`) 16. Mosaic,
ptxas and Pallas's interpreter do not check this. On a GPU a misaligned copy faults, and the process cannot
use the GPU any more.
"""

from __future__ import annotations

import re
from collections import defaultdict

TENSOR, PLAIN = 128, 16  # bytes
BASE = 1024  # alignment of dynamic shared memory on Hopper in bytes, as assumed by Mosaic's layouts
ANY = 1 << 63  # the alignment of 0
COPY = re.compile(r"cp\.async\.bulk(\.tensor)?\S*shared\S*\s+([^;]*);")
DEFINITION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\S*)\s+(%\w+)(?:\|%\w+)?\s*,\s*([^;]+);", re.MULTILINE)


def bulk_copies(ptx: str) -> list[tuple[str, bool]]:
    """All bulk copies to or from shared memory, and whether the alignment of each address is proven."""
    known = _alignments(ptx)
    copies = []
    for copy in COPY.finditer(ptx):
        target, source = re.findall(r"\[([^\]\[{,]+)", copy[2])[:2]
        terms = (source if ".global.shared" in copy[0] else target).split("+")
        alignment = min(_alignment(term.strip(), known) for term in terms)
        copies.append(
            (f"{alignment} bytes: {' '.join(copy[0].split())}", alignment >= (TENSOR if copy[1] else PLAIN))
        )
    return copies


def _alignments(ptx: str) -> dict[str, int]:
    """For each register, the largest power of two that is known to divide all of its values."""
    definitions: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for operation, register, operands in DEFINITION.findall(ptx):
        definitions[register].append((operation, [operand.strip() for operand in operands.split(",")]))
    # in loops, registers are defined by themselves
    known, before = dict.fromkeys(definitions, ANY), dict[str, int]()
    while known != before:
        before = dict(known)
        for register, values in definitions.items():
            known[register] = min(_result(*value, known) for value in values)
    return known


def _result(operation: str, operands: list[str], known: dict[str, int]) -> int:
    name, *alignments = operation.split(".")[0], *(_alignment(operand, known) for operand in operands)
    if name in ("mov", "cvt", "cvta", "shfl"):
        return alignments[0]
    if name in ("add", "sub", "or", "xor", "min", "max", "selp"):
        return min(alignments[:2])
    if name in ("mul", "mad") and ".hi" not in operation:
        return min(alignments[0] * alignments[1], ANY, *alignments[2:])
    if name == "shl" and operands[1].isdecimal():
        return min(alignments[0] << int(operands[1]), ANY)
    return max(alignments) if name == "and" else 1


def _alignment(operand: str, known: dict[str, int]) -> int:
    if re.fullmatch(r"-?\d+", operand):
        return int(operand) & -int(operand) or ANY
    return BASE if "shmem" in operand else known.get(operand, 1)
