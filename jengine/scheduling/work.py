"""The part of a step's cost that depends on how many earlier tokens its tokens attend to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Kernels read a sequence's pages once for all of its rows. The share of the first row's seconds that a
# further one needs, as measured on a CPU (benchmarks/results/rows_of_a_sequence.json).
FURTHER = 0.3


class Work(NamedTuple):
    """Counts without padding. If cache groups have windows, each count is the mean over groups, rounded down.

    Attributes:
        context: tokens that its decode rows attend to, summed over rows; for rows behind a sequence's first
            one, the share FURTHER of them.
        longest: the largest context of a single row.
        attended: (query, key) pairs of its tiles.
    """

    context: int = 0
    longest: int = 0
    attended: int = 0


NO_WORK = Work()
Windows = Sequence[int | None]  # one for each cache group; None: no window


def rows_work(positions: Sequence[int], windows: Windows = (None,)) -> tuple[int, int]:
    """(context, longest) of decode rows at these positions. A row also attends to its own token."""
    if not positions:
        return 0, 0
    last = max(positions)
    context = longest = 0
    for window in windows:
        if window is None or last < window:
            context += sum(positions) + len(positions)
            longest += last + 1
        else:
            context += sum([position + 1 if position < window else window for position in positions])
            longest += window
    return context // len(windows), longest // len(windows)


def further_work(first: int, count: int, windows: Windows = (None,)) -> tuple[int, int]:
    """The work of `count` rows of one sequence from position `first` on, behind another row of it."""
    context, longest = rows_work(range(first, first + count), windows)
    return round(FURTHER * context), longest


def pairs(start: int, length: int, windows: Windows = (None,)) -> int:
    """Number of (query, key) pairs of `length` consecutive prompt tokens, the first at position `start`."""
    total = 0
    for window in windows:
        # queries that attend to all earlier tokens
        inside = length if window is None else min(max(window - start, 0), length)
        total += inside * start + inside * (inside + 1) // 2
        total += (length - inside) * (window or 0)
    return total // len(windows)
