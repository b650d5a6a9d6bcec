"""How busy the machine is now: a factor on all costs, robust to single slow steps."""

from __future__ import annotations

import math
from collections import deque

STEPS = 15  # whose median counts: it follows a change within half as many, and up to half of them may be far off
CLIP = 3.0  # deviations further out count as so many times the spread
SPREAD = 0.05  # before steps have shown it
LEAST_SPREAD = 0.005
FORGET = 0.02  # of the spread, a step


class Drift:
    """
    Attributes:
        factor: on costs, at the moment.
        spread: mean relative deviation of a step from its prediction.
    """

    def __init__(self) -> None:
        self.factor, self.spread = 1.0, SPREAD
        self._log = 0.0  # of the factor
        self._recent = deque([0.0] * STEPS, STEPS)

    def observe(self, ratio: float) -> float:
        """A step's deviation from its costs, the log of measured over usual. Returns what the factor did not foresee, clipped."""
        clip = CLIP * self.spread
        unexpected = min(max(ratio - self._log, -clip), clip)
        self.spread = max(self.spread + FORGET * (abs(unexpected) - self.spread), LEAST_SPREAD)
        self._recent.append(ratio)
        self._log = sorted(self._recent)[STEPS // 2]
        self.factor = math.exp(self._log)
        return unexpected
