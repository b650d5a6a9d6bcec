"""How often a model is used, to predict which one is needed least."""

from __future__ import annotations

import math

MEMORY = 600.0  # seconds after which a use counts 1/e


class Usage:
    """The uses of a model, of which older ones count less: so recency and rate together.

    Attributes:
        last: time of the last use, in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self.last, self._count, self._at = now, 0.0, now

    def add(self, now: float) -> None:
        self._count, self._at, self.last = self._decayed(now) + 1.0, now, now

    def expected(self, now: float) -> float:
        """Uses to expect in the next MEMORY seconds, if uses go on as they did."""
        return self._decayed(now)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / MEMORY)
