"""The strict device's recurrent states: a tile or row that starts with any state except that of all previous
tokens fails."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from jengine.scheduling.step_plan import Span
from jengine.table.program_table import MOST_STATES


class StateMemory:
    """
    Args:
        pages: the null page included; 0: there are no states.

    Attributes:
        snapshots: states that were left behind.
    """

    def __init__(self, pages: int, tile_size: int) -> None:
        self.pages, self.tile_size, self.snapshots = pages, tile_size, 0
        self._held: dict[int, int] = {}  # by page: hash of the salt and all tokens that it stands for

    def turn(self, span: Span, content: Callable[[int], int]) -> None:
        """Runs a span's tiles or row in order. content: the hash of a sequence's tokens up to a position."""
        assert (span.states is not None) == (self.pages > 0)
        if span.states is None:
            return
        size, end = self.tile_size, span.start + span.length
        borders = [*range(span.start + size, end, size), end]
        assert len(span.states) == len(borders) + 1
        for at, border, (source, target) in zip(
            [span.start, *borders], borders, pairwise(span.states), strict=False
        ):
            assert 0 < target < self.pages and 0 <= source < self.pages
            assert not at or self._held[source] == content(at - 1), "another's state, or a stale one"
            self.snapshots += source not in (0, target)
            self._held[target] = content(border - 1)

    def cut(self, span: Span) -> list[list[int] | None]:
        """A span with drafts, cut into the states of its rows. The device computes all from the first one's,
        which stays until the last row writes. Those of wrong drafts are nonsense.
        """
        if span.states is None:
            return [None] * span.length
        first, *written = span.states
        assert len({*written}) == len(written) == span.length <= 1 + MOST_STATES
        assert first not in written[:-1] and self._held.keys() >= {first}
        self._held |= dict.fromkeys(written[:-1], 0)
        return [[*pages] for pages in pairwise(span.states)]

    def spoil(self, states: list[list[int] | None]) -> None:
        """These rows have wrong drafts."""
        self._held |= {pages[1]: 0 for pages in states if pages is not None}
