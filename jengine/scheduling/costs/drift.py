"""The machine's current load, as a factor on all costs. Single slow steps do not affect it."""

from __future__ import annotations

import math
from collections import deque

# window of the median: it follows a change within half as many steps, and tolerates up to half of them as
# outliers
STEPS = 15
CLIP = 3.0  # larger deviations are clipped to this multiple of the spread
SPREAD = 0.05  # initial value, before steps have been observed
LEAST_SPREAD = 0.005
FORGET = 0.02  # decay of the spread per step


class Drift:
    """
    Attributes:
        factor: current factor on costs.
        spread: mean relative deviation of steps from their predictions.
    """

    def __init__(self) -> None:
        self.factor, self.spread = 1.0, SPREAD
        self._log = 0.0  # log of the factor
        self._recent = deque([0.0] * STEPS, STEPS)

    def observe(self, ratio: float) -> float:
        """Takes log(measured / usual) of a step. Returns the clipped deviation that the factor did not
        predict.
        """
        clip = CLIP * self.spread
        unexpected = min(max(ratio - self._log, -clip), clip)
        self.spread = max(self.spread + FORGET * (abs(unexpected) - self.spread), LEAST_SPREAD)
        self._recent.append(ratio)
        self._log = sorted(self._recent)[STEPS // 2]
        self.factor = math.exp(self._log)
        return unexpected
