"""What a step takes of the host, as a line over its rows and tiles."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

FORGET = 0.01  # of what was learned, a step
SLOPE, SLOPE_WEIGHT = 2e-6, 50.0  # seconds for each row, and how firmly, before steps of several sizes have shown it
BASE = 2e-4  # seconds of a step, before any has shown it
CLIP = 4.0  # times as long as expected is what a longer one counts as: a pause of the garbage collector is no part of each step


class HostSeconds(NamedTuple):
    """Seconds of the host for one step. While steps overlap, it works on one while the device runs another.

    Attributes:
        plan: until the step is dispatched: schedule, pack, transfer, calls.
        collect: from its tokens' arrival until the next step is planned: collect, text, delivery.
    """

    plan: float
    collect: float


class Line(msgspec.Struct):
    """Seconds over a count: a line through weighted sums of steps, older ones counting less."""

    steps: float = 0.0
    count: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def at(self, count: int) -> float:
        if not self.steps:
            return BASE + SLOPE * count
        mean, seconds = self.count / self.steps, self.seconds / self.steps
        squares, products = self.squares / self.steps - mean * mean, self.products / self.steps - mean * seconds
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
    """HostSeconds over the number of rows and tiles."""

    plan: Line = msgspec.field(default_factory=Line)
    collect: Line = msgspec.field(default_factory=Line)

    def seconds(self, count: int) -> HostSeconds:
        return HostSeconds(self.plan.at(count), self.collect.at(count))
