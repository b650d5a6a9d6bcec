"""How many tokens a request is going to generate, by what others have generated."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

REMEMBERED = 512  # outputs
FEWEST = 16  # outputs longer than a request's own, from which its rest is guessed; with fewer, it is taken to reach its limit
QUANTILE = 0.9  # of these, so that most requests fit into what is expected of them


class OutputLengths:
    """The lengths, in tokens, of the outputs that ended last, by themselves or at their limit."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, length: int) -> None:
        if len(self._latest) == REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)

    def expected_rest(self, generated: int, limit: int) -> int:
        """Tokens that a request with so many is still expected to generate, at most up to its limit."""
        begin = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - begin
        if longer < FEWEST:
            return limit - generated
        return min(self._sorted[begin + int(QUANTILE * (longer - 1))], limit) - generated
