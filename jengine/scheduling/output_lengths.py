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

    def expected_rest(self, generated: int, limit: int, quantile: float = QUANTILE) -> int:
        """Tokens that a request with so many is still expected to generate, at most up to its limit.

        Args:
            quantile: of the outputs that were longer.
        """
        longer = self._longer(generated, quantile)
        return limit - generated if longer is None else min(longer, limit) - generated

    def least_rest(self, generated: int, most: int) -> int | None:
        """Tokens, at most `most`, that it is likely to generate at the least; None where that is not known."""
        longer = self._longer(generated, 1.0 - QUANTILE)
        return None if longer is None else min(longer - generated, most)

    def _longer(self, generated: int, quantile: float) -> int | None:
        """This quantile of the lengths beyond `generated`; None where there are too few."""
        begin = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - begin
        return None if longer < FEWEST else self._sorted[begin + int(quantile * (longer - 1))]
