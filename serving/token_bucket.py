"""A client's rate limit in tokens."""

from __future__ import annotations

ROUNDING = 1e-6  # tokens; a request that arrives exactly at its retry time must pass


class TokenBucket:
    """A token bucket with a capacity of `per_minute` tokens, which is refilled at that rate.

    The tokens of a request are known only while it runs. So a request may start while the level is positive,
    and is charged as it proceeds. The level may become negative, and then must become positive before another
    request may start. Charges before the last start never exceed `per_minute` and the refill since then.

    Times are in seconds of any clock that does not go back.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._as_of = float(per_minute), now

    def seconds_until_ready(self, now: float) -> float:
        """Seconds until a request may start, if nothing else is charged meanwhile; 0: now."""
        self._flow(now)
        missing = 1.0 - self._level
        return 0.0 if missing <= ROUNDING else missing * 60.0 / self.per_minute

    def charge(self, tokens: float, now: float) -> None:
        self._flow(now)
        self._level -= tokens

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the limit; debts are kept."""
        self._flow(now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _flow(self, now: float) -> None:
        self._level = min(self._level + (now - self._as_of) * self.per_minute / 60.0, float(self.per_minute))
        self._as_of = now
