"""Block tables, and what passes between them, the prefix index and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from jengine.scheduling.prefix_index import Block


class GroupPages(NamedTuple):
    """What a cache group asks of pages.

    Attributes:
        window: tokens that a query sees, its own included; pages before them are released. None keeps all.
        pool: index of the pool that its pages come from.
    """

    window: int | None = None
    pool: int = 0

    @property
    def name(self) -> str:
        return "full" if self.window is None else f"window[{self.window}]"


Entry = tuple[int, int, int]  # an update of a block table: cache group, index, page


class Copy(NamedTuple):
    """Pages of one pool: what the first holds is to be copied to the second."""

    pool: int
    source: int
    target: int


class Hit(NamedTuple):
    """A cached prefix. Each group has the pages that it needs to continue from there.

    Attributes:
        tokens: of the blocks.
        fetches: pages that are on the host and not on the device.
        from_host: tokens that the device alone would not have found.
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
        pages: by group, in order; 0 for those behind the window.
        first: by group, the index of the first page still held.
        sent: by group, how many entries the device knows.
        blocks: its first pages, as the prefix index knows them.
        findable: whether its other pages may enter the index.
    """

    pages: list[list[int]]
    first: list[int]
    sent: list[int]
    salt: str | None
    findable: bool
    blocks: list[Block] = field(default_factory=list)

    def held(self, group: int) -> list[int]:
        """Its pages of a group that are not behind the window."""
        return self.pages[group][self.first[group] :]
