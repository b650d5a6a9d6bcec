"""Predicts how many tokens a request will generate from the output lengths of earlier requests."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

REMEMBERED = 512  # outputs
# minimum number of longer outputs for a prediction; with fewer, a request is assumed to reach its limit
FEWEST = 16
QUANTILE = 0.9  # quantile of these lengths, high enough that most requests stay within the prediction


class OutputLengths:
    """Output lengths, in tokens, of recent requests that stopped or reached their limit."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, length: int) -> None:
        if len(self._latest) == REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)

    def expected_rest(self, generated: int, limit: int, quantile: float = QUANTILE) -> int:
        """Predicted number of further tokens of a request that has generated `generated`, at most up to its
        limit.

        Args:
            quantile: of the lengths of longer outputs.
        """
        longer = self._longer(generated, quantile)
        return limit - generated if longer is None else min(longer, limit) - generated

    def least_rest(self, generated: int, most: int) -> int | None:
        """Number of tokens, at most `most`, that a request will probably still generate at least; None:
        unknown.
        """
        longer = self._longer(generated, 1.0 - QUANTILE)
        return None if longer is None else min(longer - generated, most)

    def _longer(self, generated: int, quantile: float) -> int | None:
        """This quantile of the lengths above `generated`; None if there are too few."""
        begin = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - begin
        return None if longer < FEWEST else self._sorted[begin + int(quantile * (longer - 1))]
