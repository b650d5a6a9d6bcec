"""Finds the pages of a prefix by comparing its tokens, so hits are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jengine.scheduling.pages.block_table import CLEARED, Block, Changed, PageChange, Ranges, Salt, outside

Find = Callable[[Block, int], int]  # looks up a block's page of a cache group elsewhere; 0 if there is none


LAST_PAGE = 2  # window of a group that needs only the last page of a hit: a state at its end


def first_seen(window: int | None, position: int, page_size: int) -> int:
    """Index of the first page that a query at this position attends to."""
    return 0 if window is None else max(position - window + 1, 0) // page_size


class PrefixIndex:
    """Blocks by parent and tokens. Parents are compared by identity, so a block belongs to exactly one prefix
    and salt.

    A block is kept while it has a page or a user, so a chain can be followed past evicted pages.

    Args:
        page_size: tokens in a page.
        windows: one for each cache group.
        hit_grid: hits are multiples of this number of tokens, which is a multiple of the page size; None: the
            page size.

    Attributes:
        changed: called when a page becomes findable or stops being so; None: nobody watches.
    """

    def __init__(
        self, page_size: int, windows: Sequence[int | None] = (None,), hit_grid: int | None = None
    ) -> None:
        self._groups, self._page_size, self._windows = len(windows), page_size, windows
        self._grid = (hit_grid or page_size) // page_size
        self._windowed = [i for i, window in enumerate(windows) if window is not None]
        self._unwindowed = [i for i, window in enumerate(windows) if window is None]
        self._blocks: dict[tuple[Block | Salt, tuple[int, ...]], Block] = {}
        self._holding: list[dict[int, Block]] = [{} for _ in windows]  # by group: page -> block
        self.version = 0  # changes when pages are added or removed
        self.changed: Changed | None = None

    def chain(
        self, salt: Salt, tokens: Sequence[int], limit: int, groups: Sequence[int], find: Find | None = None
    ) -> list[Block]:
        """The known blocks of a prefix, at most `limit`, up to the first that lacks a page of one of these
        groups. find: looks up a block's page elsewhere.
        """
        size, blocks, parent, chain = self._page_size, self._blocks, salt, []
        for start in range(0, limit * size, size):
            block = blocks.get((parent, tuple(tokens[start : start + size])))
            if block is None or not all(
                [block.pages[group] or (find and find(block, group)) for group in groups]
            ):
                break
            chain.append(block)
            parent = block  # type: ignore[assignment]
        return chain

    def get(self, parent: Block | Salt, tokens: tuple[int, ...]) -> Block:
        """Returns the block of these tokens, creating it if needed."""
        block = self._blocks.get((parent, tokens))
        if block is None:
            block = self._blocks[parent, tokens] = Block(parent, tokens, self._groups)
            if isinstance(parent, Block):
                parent.users += 1
        return block

    def hold(self, block: Block, group: int, page: int) -> None:
        """Records that a page holds a block's keys and values, unless the block already has one."""
        if not block.pages[group]:
            block.pages[group] = page
            self.version += 1
            self._holding[group][page] = block
            if self.changed is not None:
                self.changed(PageChange("stored", block, group))

    def holds(self, group: int, page: int) -> bool:
        """Whether the index refers to a page."""
        return page in self._holding[group]

    def block(self, group: int, page: int) -> Block:
        """The block of a page in the index."""
        return self._holding[group][page]

    def forget(self, group: int, page: int) -> None:
        """Removes a page from the index."""
        block = self._holding[group].pop(page)
        block.pages[group] = 0
        self.version += 1
        if self.changed is not None:
            self.changed(PageChange("removed", block, group))
        self._drop(block)

    def use(self, block: Block) -> None:
        block.users += 1

    def unuse(self, block: Block) -> None:
        block.users -= 1
        self._drop(block)

    def clear(self) -> None:
        """Removes all blocks."""
        for block in self._blocks.values():
            block.pages = [0] * self._groups
        self._blocks.clear()
        self.version += 1
        for pages in self._holding:
            pages.clear()
        if self.changed is not None:
            self.changed(CLEARED)

    def _drop(self, block: Block) -> None:
        parent: Block | Salt = block
        while isinstance(parent, Block) and not parent.users and not any(parent.pages):
            block, parent = parent, parent.parent
            if self._blocks.get((parent, block.tokens)) is not block:
                return  # cleared
            del self._blocks[parent, block.tokens]
            if isinstance(parent, Block):
                parent.users -= 1

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
        chain = self.chain(salt, tokens, (len(tokens) - 1) // size, self._unwindowed, find)
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
            len(self.chain(salt, tokens, len(tokens) // self._page_size, self._unwindowed)) * self._page_size
        )

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first page that a query at this position attends to."""
        return first_seen(self._windows[group], position, self._page_size)

    def missing(self, blocks: Sequence[Block]) -> list[tuple[int, int]]:
        """(group, index) of pages that a hit needs and the device lacks, the last first."""
        firsts = [
            self.first_seen(group, len(blocks) * self._page_size) for group in range(len(self._windows))
        ]
        return [
            (group, index)
            for index in reversed(range(min(firsts), len(blocks)))
            for group, first in enumerate(firsts)
            if index >= first and not blocks[index].pages[group]
        ]

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, pages and users agree."""
        users: dict[Block, int] = {}
        for (parent, tokens), block in self._blocks.items():
            assert (block.parent, block.tokens) == (parent, tokens)
            if isinstance(parent, Block):
                assert self._blocks.get((parent.parent, parent.tokens)) is parent, (
                    "a block without its parent"
                )
                users[parent] = users.get(parent, 0) + 1
            for group, page in enumerate(block.pages):
                assert not page or self._holding[group].get(page) is block, "a page of two blocks"
        assert all(block.users >= users.get(block, 0) for block in self._blocks.values()), (
            "users are miscounted"
        )
        assert all(any(block.pages) or block.users for block in self._blocks.values()), (
            "a block without pages and users"
        )
        held = sum(len(pages) for pages in self._holding)
        assert held == sum(page > 0 for block in self._blocks.values() for page in block.pages), (
            "a page without its block"
        )
