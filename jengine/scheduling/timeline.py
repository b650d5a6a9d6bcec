"""When the device will be done with the steps that were planned, by their predicted seconds."""

from __future__ import annotations

from collections import deque


class Timeline:
    """Steps run one after the other, in the order in which they were planned.

    Attributes:
        free_at: when the last of them ends; corrected whenever one is collected.
    """

    def __init__(self) -> None:
        self.free_at = 0.0
        self._ahead: deque[float] = deque()  # seconds of steps that are not collected

    def start(self, now: float) -> float:
        """When a step that is planned now will start."""
        return max(now, self.free_at) if self._ahead else now

    def plan(self, now: float, seconds: float) -> float:
        """Adds a step. Returns when it will end."""
        self.free_at = self.start(now) + seconds
        self._ahead.append(seconds)
        return self.free_at

    def collect(self, now: float) -> None:
        """The first of the steps has ended."""
        if self._ahead:
            self._ahead.popleft()
        self.free_at = now + sum(self._ahead)
