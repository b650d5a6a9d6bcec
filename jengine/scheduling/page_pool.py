"""Who owns which page of the KV cache. Page 0 is the null page: padding is written there, and no sequence owns it."""

from __future__ import annotations

from collections import deque


class PagePool:
    """Pages 1 to num_pages - 1, each free or owned by exactly one sequence."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # the null page included
        self._free = deque(range(1, num_pages))
        self._owned: set[int] = set()

    @property
    def capacity(self) -> int:
        """Pages there are to own."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return len(self._owned)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, those longest free first.

        Raises:
            ValueError: fewer are free. Callers look at `free` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.popleft() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Gives pages back, the last first: a sequence's tail is reused before its beginning.

        Raises:
            ValueError: a page is not owned, or given twice.
        """
        if not self._owned.issuperset(pages) or len(set(pages)) != len(pages):
            raise ValueError(f"pages {pages} are not all owned, once each")
        self._owned.difference_update(pages)
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page but the null page is either free or owned, once."""
        everyone = sorted([*self._free, *self._owned])
        assert everyone == list(range(1, self.num_pages)), f"pages lost or shared: {self.free} free + {self.owned} owned of {self.capacity}"
