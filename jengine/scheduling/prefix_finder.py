"""The longest prefix of a sequence that is cached, where groups with windows need only what their windows see."""

from __future__ import annotations

from collections.abc import Sequence

from jengine.scheduling.prefix_index import Block, Find, PrefixIndex

LAST_PAGE = 2  # the window of a group that needs a hit's last page alone: a state at its end


class PrefixFinder:
    """
    Args:
        hit_grid: tokens, whole pages, of which a hit is a multiple.
        windows: of the cache groups.
    """

    def __init__(self, index: PrefixIndex, page_size: int, hit_grid: int, windows: Sequence[int | None]) -> None:
        self._index, self._page_size, self._grid, self._windows = index, page_size, hit_grid // page_size, windows
        self._windowed = [i for i, window in enumerate(windows) if window is not None]
        self._unwindowed = [i for i, window in enumerate(windows) if window is None]

    def longest(self, tokens: Sequence[int], salt: str | None, find: Find | None = None) -> list[Block]:
        """The blocks of a hit: on the grid, and never with the last token, which must be computed to get on.

        Args:
            find: where else a block's page of a group may be.
        """
        size, grid = self._page_size, self._grid
        chain = self._index.chain(salt, tokens, (len(tokens) - 1) // size, self._unwindowed, find)
        del chain[len(chain) // grid * grid :]
        while chain and self._windowed:
            firsts = [self.first_seen(group, len(chain) * size) for group in range(len(self._windows))]
            for index in range(len(chain) - 1, min(firsts[group] for group in self._windowed) - 1, -1):
                block = chain[index]
                if any(not page and index >= firsts[group] and not (find and find(block, group)) for group, page in enumerate(block.pages)):
                    del chain[index // grid * grid :]  # any longer prefix needs this page too
                    break
            else:
                break
        return chain

    def branch(self, tokens: Sequence[int], salt: str | None) -> int:
        """How many of these tokens have pages of all groups without a window: at least as many as a hit has."""
        return len(self._index.chain(salt, tokens, len(tokens) // self._page_size, self._unwindowed)) * self._page_size

    def first_seen(self, group: int, position: int) -> int:
        """The index of the first page that a query at this position sees."""
        window = self._windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self._page_size

    def missing(self, blocks: Sequence[Block]) -> list[tuple[int, int]]:
        """(group, index) of pages that a hit of these blocks needs and the device has not; the tail first."""
        firsts = [self.first_seen(group, len(blocks) * self._page_size) for group in range(len(self._windows))]
        return [
            (group, index)
            for index in reversed(range(min(firsts), len(blocks)))
            for group, first in enumerate(firsts)
            if index >= first and not blocks[index].pages[group]
        ]
