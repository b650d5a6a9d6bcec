"""Finds the longest cached prefix of a sequence. Groups with a window need only the pages inside the
window.
"""

from __future__ import annotations

from collections.abc import Sequence

from jengine.scheduling.pages.block import Block, Salt
from jengine.scheduling.pages.block_table import Ranges, outside
from jengine.scheduling.pages.prefix_index import Find, PrefixIndex

LAST_PAGE = 2  # window of a group that needs only the last page of a hit: a state at its end


def first_seen(window: int | None, position: int, page_size: int) -> int:
    """Index of the first page that a query at this position attends to."""
    return 0 if window is None else max(position - window + 1, 0) // page_size


class PrefixFinder:
    """Finds cached prefixes in an index.

    Args:
        hit_grid: hits are multiples of this number of tokens, which is a multiple of the page size.
        windows: one for each cache group.
    """

    def __init__(
        self, index: PrefixIndex, page_size: int, hit_grid: int, windows: Sequence[int | None]
    ) -> None:
        self._index, self._page_size, self._grid, self._windows = (
            index,
            page_size,
            hit_grid // page_size,
            windows,
        )
        self._windowed = [i for i, window in enumerate(windows) if window is not None]
        self._unwindowed = [i for i, window in enumerate(windows) if window is None]

    def longest(
        self, tokens: Sequence[int], salt: Salt, find: Find | None = None, whole: Ranges = ()
    ) -> list[Block]:
        """The blocks of the longest hit. It ends on the grid and excludes the last token, which must always
        be computed.

        Args:
            find: looks up a block's page of a group elsewhere, such as on the host.
            whole: ranges of tokens that it does not end within.
        """
        size = self._page_size
        chain = self._index.chain(salt, tokens, (len(tokens) - 1) // size, self._unwindowed, find)
        self._shorten(chain, len(chain), whole)
        while chain and self._windowed:
            firsts = [self.first_seen(group, len(chain) * size) for group in range(len(self._windows))]
            for index in range(len(chain) - 1, min(firsts[group] for group in self._windowed) - 1, -1):
                block = chain[index]
                if any(
                    not page and index >= firsts[group] and not (find and find(block, group))
                    for group, page in enumerate(block.pages)
                ):
                    self._shorten(chain, index, whole)  # every longer prefix needs this page too
                    break
            else:
                break
        return chain

    def _shorten(self, chain: list[Block], blocks: int, whole: Ranges) -> None:
        """Shortens a hit to at most this many blocks, to where it may end."""
        end = blocks + 1
        while blocks < end:
            end = blocks // self._grid * self._grid
            blocks = outside(whole, end * self._page_size) // self._page_size
        del chain[end:]

    def branch(self, tokens: Sequence[int], salt: Salt) -> int:
        """Number of tokens with pages in all groups without a window. At least as long as the hit."""
        return (
            len(self._index.chain(salt, tokens, len(tokens) // self._page_size, self._unwindowed))
            * self._page_size
        )

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first page that a query at this position attends to."""
        return first_seen(self._windows[group], position, self._page_size)

    def missing(self, blocks: Sequence[Block]) -> list[tuple[int, int]]:
        """(group, index) of pages that a hit of these blocks needs and that are not on the device, the last
        first.
        """
        firsts = [
            self.first_seen(group, len(blocks) * self._page_size) for group in range(len(self._windows))
        ]
        return [
            (group, index)
            for index in reversed(range(min(firsts), len(blocks)))
            for group, first in enumerate(firsts)
            if index >= first and not blocks[index].pages[group]
        ]
