"""Whether the bulk copies of a kernel's PTX begin where CUDA wants them to in shared memory.

A copy by a tensor map (`cp.async.bulk.tensor`) needs 128 bytes, a plain one (`cp.async.bulk`) 16. Neither Mosaic, nor ptxas, nor
Pallas's interpreter checks that; on a GPU such a copy faults, and nothing runs in that process any more.
"""

from __future__ import annotations

import re
from collections import defaultdict

TENSOR, PLAIN = 128, 16  # bytes
BASE = 1024  # bytes that dynamic shared memory is aligned to on Hopper, as Mosaic's layouts assume
ANY = 1 << 63  # the alignment of 0
COPY = re.compile(r"cp\.async\.bulk(\.tensor)?\S*shared\S*\s+([^;]*);")
DEFINITION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\S*)\s+(%\w+)(?:\|%\w+)?\s*,\s*([^;]+);", re.MULTILINE)


def bulk_copies(ptx: str) -> list[tuple[str, bool]]:
    """Every bulk copy to or from shared memory, and whether its address there is provably aligned as it must be."""
    known = _alignments(ptx)
    copies = []
    for copy in COPY.finditer(ptx):
        target, source = re.findall(r"\[([^\]\[{,]+)", copy[2])[:2]
        terms = (source if ".global.shared" in copy[0] else target).split("+")
        alignment = min(_alignment(term.strip(), known) for term in terms)
        copies.append((f"{alignment} bytes: {' '.join(copy[0].split())}", alignment >= (TENSOR if copy[1] else PLAIN)))
    return copies


def _alignments(ptx: str) -> dict[str, int]:
    """For each register, the largest power of two that is known to divide all its values."""
    definitions: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for operation, register, operands in DEFINITION.findall(ptx):
        definitions[register].append((operation, [operand.strip() for operand in operands.split(",")]))
    known, before = dict.fromkeys(definitions, ANY), dict[str, int]()  # loops define registers by themselves
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
