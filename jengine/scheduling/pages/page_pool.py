"""Pages of the KV cache with reference counts. Page 0, the null page, takes padding and has no holder."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


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
