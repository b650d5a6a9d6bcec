"""Finds the pages of a prefix by comparing its tokens, so hits are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jengine.scheduling.pages.block import Block, Salt
from jengine.scheduling.pages.block_table import CLEARED, Changed, PageChange

Find = Callable[[Block, int], int]  # looks up a block's page of a cache group elsewhere; 0 if there is none


class PrefixIndex:
    """Blocks by parent and tokens. Parents are compared by identity, so a block belongs to exactly one prefix
    and salt.

    A block is kept while it has a page or a user, so a chain can be followed past evicted pages.

    Attributes:
        changed: called when a page becomes findable or stops being so; None: nobody watches.
    """

    def __init__(self, groups: int, page_size: int) -> None:
        self._groups, self._page_size = groups, page_size
        self._blocks: dict[tuple[Block | Salt, tuple[int, ...]], Block] = {}
        self._holding: list[dict[int, Block]] = [{} for _ in range(groups)]  # by group: page -> block
        self.version = 0  # changes when pages are added or removed
        self.changed: Changed | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def chain(
        self,
        salt: Salt,
        tokens: Sequence[int],
        limit: int,
        groups: Sequence[int],
        find: Find | None = None,
    ) -> list[Block]:
        """The known blocks of a prefix, at most `limit`, up to the first that lacks a page of one of these
        groups.

        Args:
            find: looks up a block's page elsewhere.
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

    def follow(self, salt: Salt, tokens: Sequence[int], limit: int) -> list[Block]:
        """The known blocks of a prefix, at most `limit`, whether or not they have pages."""
        return self.chain(salt, tokens, limit, ())

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
