"""The launches of a program that XLA compiled for a GPU: thunks, and command buffers (CUDA graphs) of several
thunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(
    r"^( *)\d+: (k\w+)\s+\[[^\]]*\]\s*(.*?)(?: grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), \d+,"
    r" \d+\].*)?\s*$"
)
BUFFER, WHILE, COPY = "kCommandBuffer", "kWhile", "kCopy"


@dataclass(frozen=True, slots=True)
class Thunk:
    """A thunk.

    Attributes:
        kind: XLA's name, such as kCustomKernel, kGemm, kCommandBuffer, kWhile.
        name: name of the operation in the compiled text.
        blocks, threads: number of blocks of a kernel, and of threads per block; 0 if XLA does not report
            them.
        nested: thunks of a command buffer, or of a loop's condition and body.
    """

    kind: str
    name: str
    blocks: int
    threads: int
    nested: tuple[Thunk, ...]

    def leaves(self) -> Iterator[Thunk]:
        """This thunk, or the innermost thunks nested in it."""
        if self.kind not in (BUFFER, WHILE):
            yield self
        for thunk in self.nested:
            yield from thunk.leaves()


def dumping(folder: Path) -> dict[str, str | bool]:
    """XLA options that dump the thunks of compiled programs to a folder, for `dumped`."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def dumped(folder: Path) -> dict[str, tuple[Thunk, ...]]:
    """The launches of each program in order, by the name at the beginning of XLA's text of the program."""
    found = {}
    for first in folder.glob("*.thunk_sequence.txt"):
        # missing if the passes changed nothing
        last = Path(str(first).replace(".thunk_sequence.", ".thunk_sequence_after_thunk_passes."))
        found[first.name.split(".")[1]] = parsed((last if last.exists() else first).read_text())
    return found


def parsed(text: str) -> tuple[Thunk, ...]:
    """Parses XLA's dump."""
    lines = [(len(match[1]), match) for match in map(LINE.match, text.splitlines()) if match]
    return tuple(_nested(lines))


def leaves(thunks: Iterable[Thunk]) -> list[Thunk]:
    """The thunks that run on the device; those of a loop once."""
    return [leaf for thunk in thunks for leaf in thunk.leaves()]


def _nested(lines: list[tuple[int, re.Match[str]]]) -> Iterator[Thunk]:
    while lines:
        (depth, match), *rest = lines
        inside = next((i for i, (other, _) in enumerate(rest) if other <= depth), len(rest))
        blocks = int(match[4] or 0) * int(match[5] or 0) * int(match[6] or 0)
        yield Thunk(match[2], match[3], blocks, int(match[7] or 0), tuple(_nested(rest[:inside])))
        lines = rest[inside:]
