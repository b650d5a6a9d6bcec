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
FORGET_MEAN = 0.002  # decay of the mean per step
MOST = 1.4  # log of the most that a step may exceed its costs and count in the mean: 4 times


class Drift:
    """
    Attributes:
        factor: current factor on costs.
        spread: mean relative deviation of steps from their predictions.
        mean: mean duration of steps relative to their costs, under all loads of the last hundreds of steps.
    """

    def __init__(self) -> None:
        self.factor, self.spread, self.mean = 1.0, SPREAD, 1.0
        self._log = 0.0  # log of the factor
        self._bias = 0.0  # mean deviation from the median, which is not 0 if slow steps are rare and far away
        self._recent = deque([0.0] * STEPS, STEPS)

    def observe(self, ratio: float) -> float:
        """Takes log(measured / usual) of a step. Returns the clipped deviation that the factor did not
        predict, minus the mean of these deviations.

        So the sum of what it returns is bounded. Otherwise costs that follow the deviations would grow or
        shrink without end, and the factor would hide it.
        """
        clip = CLIP * self.spread
        unexpected = min(max(ratio - self._log, -clip), clip)
        self.spread = max(self.spread + FORGET * (abs(unexpected) - self.spread), LEAST_SPREAD)
        self._recent.append(ratio)
        self._log = sorted(self._recent)[STEPS // 2]
        self.factor = math.exp(self._log)
        self.mean += FORGET_MEAN * (math.exp(min(ratio, MOST)) - self.mean)
        self._bias += FORGET * (unexpected - self._bias)
        return unexpected - self._bias
