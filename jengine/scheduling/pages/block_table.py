"""Pages of the KV cache with reference counts, and data types for block tables: tables, changes of pages, and
ranges of tokens that a step computes as a whole. Page 0, the null page, takes padding and has no holder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
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


TOKENS, STATES = 0, 1  # pools: pages of tokens, for all groups with block tables, and of recurrent states
Entry = tuple[int, int, int]  # an update of a block table: cache group, index, page


class Copy(NamedTuple):
    """Copies the contents of the first page to the second."""

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


class PagePool:
    """Pages 1 to num_pages - 1. A page is free, cached (no holder, contents kept for reuse) or owned (one or
    more holders).

    Args:
        num_pages: number of pages, the null page included.
        evicted: called with a cached page before it is reused.
    """

    def __init__(self, num_pages: int, evicted: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.evictions = 0
        self._evicted = evicted
        self._free = deque(range(1, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * num_pages

    @property
    def capacity(self) -> int:
        """Number of pages, without the null page."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def owned(self) -> int:
        return self.capacity - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Number of pages that `take` can return: the free ones, then the cached ones."""
        return len(self._free) + len(self._cached)

    def holders(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Gives `count` pages one holder each: first the longest free pages, then the least recently used
        cached ones.

        Raises:
            ValueError: fewer pages are available. Callers check `available` first.
        """
        if count > self.available:
            raise ValueError(f"{count} pages requested, {self.free} free, {self.cached} cached")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                self.evictions += 1
                self._evicted(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Adds a holder to a page that is owned or cached."""
        if not self._holders[page]:
            del self._cached[page]
        self._holders[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """Removes a holder. A page without holders becomes cached if `keep` is set, otherwise free.

        Raises:
            ValueError: the page has no holder.
        """
        if not self._holders[page]:
            raise ValueError(f"page {page} is not owned")
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if keep:
            self._cached[page] = None
        else:
            self._free.append(page)

    def forget(self) -> None:
        """Frees all cached pages."""
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Raises AssertionError unless each page has one state, and owned pages so many holders."""
        owned = [page for page in range(1, self.num_pages) if self._holders[page]]
        everyone = sorted([*self._free, *self._cached, *owned])
        assert everyone == list(range(1, self.num_pages)), (
            f"lost or doubled: {self.free} free, {self.cached} cached, {self.owned} owned"
        )
        assert {page: self._holders[page] for page in owned} == holders, "holders are miscounted"
