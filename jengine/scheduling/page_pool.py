"""Pages of the KV cache by how many sequences hold them. Page 0 is the null page: padding is written there, and no sequence holds it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class PagePool:
    """Pages 1 to num_pages - 1. Each is free; or cached: held by no sequence, and kept for what it holds; or owned by one or more.

    Args:
        num_pages: the null page included.
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
        """Pages there are to own."""
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
        """Pages that `take` can give: the free ones, then the cached ones."""
        return len(self._free) + len(self._cached)

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Gives `count` pages one holder each: those longest free first, then the least recently used of those cached.

        Raises:
            ValueError: fewer are available. Callers look at `available` first.
        """
        if count > self.available:
            raise ValueError(f"{count} pages asked for, {self.free} free, {self.cached} cached")
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
        """One more holder of a page that is owned or cached."""
        if not self._holders[page]:
            del self._cached[page]
        self._holders[page] += 1

    def release(self, page: int, *, keep: bool) -> None:
        """One holder less. A page that has none left is cached if it is worth keeping, else free.

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
        """Raises AssertionError unless each page is free, cached or owned, once, by as many holders as given."""
        owned = [page for page in range(1, self.num_pages) if self._holders[page]]
        everyone = sorted([*self._free, *self._cached, *owned])
        assert everyone == list(range(1, self.num_pages)), f"lost or doubled: {self.free} free, {self.cached} cached, {self.owned} owned"
        assert {page: self._holders[page] for page in owned} == holders, "holders are miscounted"
