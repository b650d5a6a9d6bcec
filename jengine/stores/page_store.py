"""The interface of a store of pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

Part = bytes | memoryview  # consecutive bytes of a page
NAME_BYTES = 32
MAX_PAGE = 1 << 28  # bytes


class StoreError(Exception):
    """A store could not be reached, or answered with nonsense. Its pages count as missing."""


class PageStore(Protocol):
    """Pages by name. A name is NAME_BYTES long and says all that a page's contents depend on, so a page never
    changes under its name. Thread-safe.

    A store may lose any page at any time. Every method may raise StoreError or OSError, and none may take
    much longer than the store's own time limit.
    """

    def find(self, names: Sequence[bytes], wait: float = 0.0) -> list[bool]:
        """Whether it has these pages.

        Args:
            wait: the most seconds to wait for pages that are on their way into the store.
        """

    def load(self, names: Sequence[bytes]) -> Iterator[bytes | None]:
        """The pages, in this order; None for one that is missing or damaged."""

    def keep(self, name: bytes, page: Sequence[Part]) -> bool:
        """Stores a page, in place of the ones that were used the longest time ago. Returns False if there is
        no room.
        """

    def drop(self, name: bytes) -> None:
        """Forgets a page."""

    def close(self) -> None:
        """Gives back connections and threads. May be called repeatedly."""


def size_of(page: Sequence[Part]) -> int:
    """Bytes of a page."""
    return sum(len(part) for part in page)
