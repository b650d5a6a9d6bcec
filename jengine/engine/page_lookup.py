"""Which pages of a prompt to load from a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jengine.scheduling.pages.block import Salt
from jengine.scheduling.pages.prefix_finder import first_seen

Place = tuple[int, int]  # index of a block, cache group


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt for whose prefix pages may be in a store.

    Attributes:
        tokens: of the blocks that a hit may have at most.
        here: for each of these blocks, whether the page of each group is on the device or on the host.
        windows: of the groups.
        grid: a hit has a multiple of this number of blocks.
    """

    salt: Salt
    tokens: Sequence[int]
    here: Sequence[Sequence[bool]]
    windows: Sequence[int | None]
    page_size: int
    grid: int

    @property
    def missing(self) -> list[Place]:
        """All pages that are not here."""
        return [
            (index, group) for index, own in enumerate(self.here) for group, one in enumerate(own) if not one
        ]

    def longest(self, there: set[Place] | frozenset[Place] = frozenset()) -> int:
        """The blocks of the longest hit of pages that are here and of these in a store."""
        best, runs = 0, [0] * len(self.windows)  # number of consecutive blocks with a page, up to here
        for index, own in enumerate(self.here):
            for group, one in enumerate(own):
                runs[group] = runs[group] + 1 if one or (index, group) in there else 0
            blocks = index + 1
            needed = [blocks - self._first(group, blocks) for group in range(len(runs))]
            if blocks % self.grid == 0 and all(run >= need for run, need in zip(runs, needed, strict=True)):
                best = blocks
        return best

    def needed(self, blocks: int) -> list[Place]:
        """The pages that a hit of so many blocks needs and that are not here, the first blocks first."""
        return [
            (index, group)
            for index, own in enumerate(self.here[:blocks])
            for group, one in enumerate(own)
            if not one and index >= self._first(group, blocks)
        ]

    def _first(self, group: int, blocks: int) -> int:
        return first_seen(self.windows[group], blocks * self.page_size, self.page_size)
