"""Data types for block tables, shared by the block manager, the prefix index and the device's updates:
tables, changes of pages, and ranges of tokens that a step computes as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np


class LoraSalt(NamedTuple):
    """The salt of a sequence with an adapter: the number of its loading, its name, the request's own."""

    number: int
    name: str
    salt: str | None


Salt = str | LoraSalt | None  # of a sequence


class Block:
    """The tokens of one page after a given prefix, and the pages that hold their keys and values.

    Attributes:
        parent: the preceding block; the salt, for the first block of a sequence.
        pages: page numbers by cache group; 0: none.
        users: number of following blocks, sequences that will add one, and copies on the host.
        digest: of the tokens and the prefix, for other engines; see page_events.py. None: not computed.
    """

    __slots__ = ("digest", "pages", "parent", "tokens", "users")

    def __init__(self, parent: Block | Salt, tokens: tuple[int, ...], groups: int) -> None:
        self.parent, self.tokens = parent, tokens
        self.pages = [0] * groups
        self.users = 0
        self.digest: bytes | None = None


Medium = Literal["GPU", "CPU"]  # where a page lies, by vLLM's names, whatever the device is
DEVICE: Medium = "GPU"
HOST: Medium = "CPU"
Ranges = Sequence[tuple[int, int]]  # start and end of each, ascending and apart


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
        """A sequence's pages of a group, without those behind the window."""
        return self.pages[group][self.first[group] :]


class PageChange(NamedTuple):
    """A page can be found from now on, or cannot be found any more; or none can.

    Attributes:
        block: whose page it is. Its tokens and its parent never change.
        group: index of the cache group, that of recurrent states last.
    """

    kind: Literal["stored", "removed", "cleared"]
    block: Block | None = None
    group: int = 0
    medium: Medium = DEVICE


Changed = Callable[[PageChange], None]
CLEARED = PageChange("cleared")


def next_range(ranges: Ranges, position: int) -> tuple[int, int] | None:
    """The first range, or its rest, that starts at this position or later."""
    at = bisect_left(ranges, (position,))
    if at and (end := ranges[at - 1][1]) > position:
        return position, end
    return ranges[at] if at < len(ranges) else None


def outside(ranges: Ranges, position: int) -> int:
    """The last place up to this position where a cut splits no range."""
    at = bisect_left(ranges, (position,)) - 1
    return ranges[at][0] if at >= 0 and position < ranges[at][1] else position


def meets(ranges: Ranges, start: int, end: int) -> bool:
    """Whether any token in [start, end) is in a range."""
    at = bisect_left(ranges, (end,)) - 1
    return at >= 0 and ranges[at][1] > start


def ahead(ranges: Ranges, start: int, end: int) -> np.ndarray | None:
    """How many tokens behind it each token in [start, end) sees, int32; None: none. `end` splits no range."""
    out, at = None, start
    while (following := next_range(ranges, at)) is not None and following[0] < end:
        first, at = following
        if out is None:
            out = np.zeros(end - start, np.int32)
        out[first - start : at - start] = np.arange(at - first)[::-1]
    return out
