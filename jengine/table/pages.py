"""Number of pages that tokens need."""

from __future__ import annotations

SWAPS = 16  # pages that one call moves between device and host


def pages_of(tokens: int, page_size: int) -> int:
    """Number of pages that hold this many tokens."""
    return -(-tokens // page_size)


def most_pages(tokens: int, window: int | None, page_size: int, ahead: int) -> int:
    """Maximum number of pages that a sequence holds in a cache group, until it has `tokens` tokens.

    Args:
        window: tokens that a query attends to, its own included; earlier pages are released. None: all are
            kept.
        ahead: tokens computed at a time.
    """
    every = pages_of(tokens, page_size)
    return every if window is None else min(every, pages_of(window - 1 + ahead, page_size) + 1)
