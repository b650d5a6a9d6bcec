"""How long to wait before an engine is started again."""

from __future__ import annotations


class BackOff:
    """Delays before restarts, in seconds: doubled each time, from `first` to `longest`, and reset after an
    engine that lived for `healthy` seconds."""

    def __init__(self, first: float = 0.5, longest: float = 60.0, healthy: float = 60.0) -> None:
        self.first, self.longest, self.healthy = first, longest, healthy
        self._next = first

    def next(self, lived: float) -> float:
        """The result that `after` would have."""
        return self.first if lived >= self.healthy else self._next

    def after(self, lived: float) -> float:
        """The delay after an engine that lived for this many seconds; 0: it did not start."""
        seconds = self.next(lived)
        self._next = min(2 * seconds, self.longest)
        return seconds
