"""A client's rate limit in tokens."""

from __future__ import annotations

ROUNDING = 1e-6  # tokens; a request that arrives exactly at its retry time must pass


class TokenBucket:
    """A token bucket with a capacity of `per_minute` tokens, which is refilled at that rate.

    The tokens of a request are known only while it runs. So it reserves what it may use when it starts, and
    is charged as it proceeds. A request may start while the level, less what running requests have reserved,
    is positive. The level may become negative, and then must become positive before another request may
    start.

    Times are in seconds of any clock that does not go back.

    Attributes:
        reserved: tokens that running requests may still use.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._as_of, self.reserved = float(per_minute), now, 0.0

    def seconds_until_ready(self, now: float) -> float:
        """Seconds until a request may start, if running ones use what they have reserved; 0: now."""
        self._flow(now)
        missing = 1.0 - (self._level - self.reserved)
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
