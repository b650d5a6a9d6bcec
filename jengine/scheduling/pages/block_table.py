"""Data types for block tables, shared by the block manager, the prefix index and the device's updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jengine.scheduling.pages.block import Block, Salt


class GroupPages(NamedTuple):
    """The pages that a cache group needs.

    Attributes:
        window: number of tokens that a query attends to, its own included; earlier pages are released. None:
            all are kept.
        pool: index of the pool that supplies its pages.
    """

    window: int | None = None
    pool: int = 0

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window[{self.window}]"


Entry = tuple[int, int, int]  # an update of a block table: cache group, index, page


class Copy(NamedTuple):
    """Copies the contents of the first page to the second, within one pool."""

    pool: int
    source: int
    target: int


class Hit(NamedTuple):
    """A cached prefix. Each group has the pages that it needs to continue after the prefix.

    Attributes:
        tokens: number of tokens in the blocks.
        fetches: number of pages that are on the host but not on the device.
        from_host: number of tokens found only thanks to the host tier.
    """

    blocks: list[Block]
    tokens: int
    fetches: int = 0
    from_host: int = 0


NO_HIT = Hit([], 0)


@dataclass(slots=True)
class BlockTable:
    """A sequence's pages.

    Attributes:
        pages: page numbers by group, in order; 0 for pages behind the window.
        first: by group, index of the first page still held.
        sent: by group, number of entries that the device knows.
        blocks: the prefix index's blocks for its first pages.
        findable: whether its other pages may enter the index.
    """

    pages: list[list[int]]
    first: list[int]
    sent: list[int]
    salt: Salt
    findable: bool
    blocks: list[Block] = field(default_factory=list)

    def held(self, group: int) -> list[int]:
        """Its pages of a group, without those behind the window."""
        return self.pages[group][self.first[group] :]
