"""Ranges of a prompt's tokens that one step computes as a whole: images whose tokens see each other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

Ranges = Sequence[tuple[int, int]]  # start and end of each, ascending and apart


def next_range(ranges: Ranges, position: int) -> tuple[int, int] | None:
    """The first range that starts at this position or later."""
    at = bisect_left(ranges, (position,))
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
    """How many tokens behind it each token in [start, end) sees, int32; None: none. Splits no range."""
    out = None
    for at in range(bisect_left(ranges, (start,)), bisect_left(ranges, (end,))):
        first, last = ranges[at]
        if out is None:
            out = np.zeros(end - start, np.int32)
        out[first - start : last - start] = np.arange(last - first)[::-1]
    return out
