"""The protocol of page stores, and pages in this process's memory, for others to fetch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Part = bytes | memoryview  # consecutive bytes of a page
NAME_BYTES = 32
MAX_PAGE = 1 << 28  # bytes
POLL_SECONDS = 0.01


class StoreError(Exception):
    """A store could not be reached, or answered with nonsense. Its pages count as missing."""


class PageStore(Protocol):
    """Pages by name. A name is NAME_BYTES long and says all that a page's contents depend on, so a page never
    changes under its name. Thread-safe.

    A store may lose any page at any time. Every method may raise StoreError or OSError, and none may take
    much longer than the store's own time limit.
    """

    def find(self, names: Sequence[bytes], wait: float = 0.0) -> list[bool]:
        """Whether it has these pages. wait: the most seconds to wait for pages that are on their way into the
        store.
        """

    def load(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        """The pages, in this order; None for one that is missing or damaged."""

    def keep(self, name: bytes, page: Sequence[Part]) -> bool:
        """Stores a page in place of those used the longest time ago. False: there is no room."""

    def close(self) -> None:
        """Gives back connections and threads. May be called repeatedly."""


def size_of(page: Sequence[Part]) -> int:
    """Bytes of a page."""
    return sum(len(part) for part in page)


@dataclass(slots=True)
class _Page:
    parts: list[Part]
    size: int
    until: float  # when its lease ends; 0: it has none


class MemoryStore:
    """At most `max_bytes` of pages. A page has a lease until it was loaded or `lease` seconds have passed;
    until then, no other page takes its place.

    Args:
        coming: whether pages are on their way into the store. Called in any thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        max_bytes: int,
        lease: float = 0.0,
        coming: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes, self.lease, self.coming, self._clock = max_bytes, lease, coming, clock
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()  # least recently used first
        self._changed = threading.Condition()
        self.used = 0  # bytes

    def find(self, names: Sequence[bytes], wait: float = 0.0) -> list[bool]:
        end = time.monotonic() + wait
        with self._changed:
            while True:
                expected = wait > 0.0 and self.coming()  # before looking: a page that came since is found
                present = [name in self._pages for name in names]
                left = end - time.monotonic()
                if all(present) or not expected or left <= 0.0:
                    return present
                self._changed.wait(min(left, POLL_SECONDS))

    def load(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        """Yields the pages, and ends their leases."""
        for name in names:
            with self._changed:
                page = self._pages.get(name)
                if page is not None:
                    self._pages.move_to_end(name)
                    page.until = 0.0
            yield None if page is None else b"".join(page.parts)

    def keep(self, name: bytes, page: Sequence[Part]) -> bool:
        """Keeps a page. The parts must not change afterwards: they are not copied."""
        size, now = size_of(page), self._clock()
        with self._changed:
            old = self._pages.get(name)
            if old is None and not self._make_room(size, now):
                return False
            if old is None:
                self._pages[name] = _Page([*page], size, now + self.lease)
                self.used += size
            else:
                old.until = now + self.lease
                self._pages.move_to_end(name)
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Forgets all pages."""
        with self._changed:
            self._pages.clear()
            self.used = 0

    def _make_room(self, size: int, now: float) -> bool:
        free, evicted = self.max_bytes - self.used, list[bytes]()
        for name, page in self._pages.items():
            if free >= size:
                break
            if page.until <= now:
                evicted.append(name)
                free += page.size
        if free < size:
            return False
        for name in evicted:
            self.used -= self._pages.pop(name).size
        return True
