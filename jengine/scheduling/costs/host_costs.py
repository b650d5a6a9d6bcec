"""Host time of a step, as a linear function of its rows and tiles."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

FORGET = 0.01  # decay of older observations per step
# seconds per row, and the weight of this prior until steps of several sizes have been observed
SLOPE, SLOPE_WEIGHT = 2e-6, 50.0
BASE = 2e-4  # seconds per step, before any has been observed
# longer steps are clipped to this multiple of the expected time, since garbage collection pauses are not part
# of each step
CLIP = 4.0


class HostSeconds(NamedTuple):
    """Host seconds for one step. The host prepares one step while the device runs another.

    Attributes:
        plan: until the step is dispatched: schedule, pack, transfer, calls.
        collect: from the arrival of its tokens until the next step is planned: collect, text, delivery.
    """

    plan: float
    collect: float


class LinearFit(msgspec.Struct):
    """Linear regression of seconds over a count, with older steps weighted less."""

    steps: float = 0.0
    count: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def at(self, count: int) -> float:
        if not self.steps:
            return BASE + SLOPE * count
        mean, seconds = self.count / self.steps, self.seconds / self.steps
        squares, products = (
            self.squares / self.steps - mean * mean,
            self.products / self.steps - mean * seconds,
        )
        weight = SLOPE_WEIGHT / self.steps
        slope = max((products + weight * SLOPE) / (squares + weight), 0.0)
        return max(seconds + slope * (count - mean), 0.0)

    def observe(self, count: int, seconds: float) -> None:
        if self.steps >= 1.0:
            seconds = min(seconds, CLIP * self.at(count))
        keep = 1.0 - FORGET
        self.steps = self.steps * keep + 1.0
        self.count = self.count * keep + count
        self.seconds = self.seconds * keep + seconds
        self.squares = self.squares * keep + count * count
        self.products = self.products * keep + count * seconds


class HostCosts(msgspec.Struct):
    """HostSeconds as functions of the number of rows and tiles."""

    plan: LinearFit = msgspec.field(default_factory=LinearFit)
    collect: LinearFit = msgspec.field(default_factory=LinearFit)
