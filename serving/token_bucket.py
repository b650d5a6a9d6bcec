"""A client's rate limit in tokens."""

from __future__ import annotations

ROUNDING = 1e-6  # tokens: a request that comes exactly when it was told to must pass


class TokenBucket:
    """Tokens flow in, `per_minute` of them, and at most as many are kept.

    What a request takes is known only as it runs. So one may start while a token is left, and is charged as it goes on; the level may
    fall below zero, and then it must rise again before another may start. What was charged before the last start is never more than
    `per_minute` and what has flowed in since.

    Times are in seconds of any clock that does not go back.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._as_of = float(per_minute), now

    def seconds_until_ready(self, now: float) -> float:
        """Until a request may start, if nothing more is charged meanwhile; 0 is now."""
        self._flow(now)
        missing = 1.0 - self._level
        return 0.0 if missing <= ROUNDING else missing * 60.0 / self.per_minute

    def charge(self, tokens: int, now: float) -> None:
        self._flow(now)
        self._level -= tokens

    def resize(self, per_minute: int, now: float) -> None:
        """A new limit; debts stay."""
        self._flow(now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _flow(self, now: float) -> None:
        self._level = min(self._level + (now - self._as_of) * self.per_minute / 60.0, float(self.per_minute))
        self._as_of = now
