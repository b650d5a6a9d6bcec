"""How many pages tokens take."""

from __future__ import annotations

SWAPS = 16  # pages that one call moves between the device and the host


def pages_of(tokens: int, page_size: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // page_size)


def most_pages(tokens: int, window: int | None, page_size: int, ahead: int) -> int:
    """Pages that a sequence holds at most in a cache group, on its way to `tokens` tokens.

    Args:
        window: tokens that a query sees, its own included; pages before them are released. None keeps all.
        ahead: tokens computed at a time.
    """
    every = pages_of(tokens, page_size)
    return every if window is None else min(every, pages_of(window - 1 + ahead, page_size) + 1)
