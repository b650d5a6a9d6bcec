"""Predicts when the device will have finished the planned steps."""

from __future__ import annotations

from collections import deque


class Timeline:
    """Steps run one after the other, in the order in which they were planned. In a pipeline, each of the
    stages does so, and the steps' seconds are those of one stage.

    Attributes:
        free_at: predicted time at which the first stage has finished the last planned step, corrected
            whenever a step is collected.
    """

    def __init__(self, stages: int = 1) -> None:
        self.free_at = 0.0
        self._behind = stages - 1  # the first stage
        self._ahead: deque[float] = deque()  # seconds of steps that are not collected yet

    def start(self, now: float) -> float:
        """Start time of a step that is planned now."""
        return max(now, self.free_at) if self._ahead else now

    def plan(self, now: float, seconds: float) -> float:
        """Adds a step. Returns its end time."""
        self.free_at = self.start(now) + seconds
        self._ahead.append(seconds)
        return self.free_at + self._behind * seconds

    def collect(self, now: float) -> None:
        """The first step has ended."""
        if self._ahead:
            self._ahead.popleft()
        last = self._behind * self._ahead[-1] if self._ahead else 0.0
        self.free_at = now + max(sum(self._ahead) - last, 0.0)
