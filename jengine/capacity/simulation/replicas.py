"""Number of engines needed to serve a trace within targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jengine.capacity.simulation.outcome import Outcome
from jengine.capacity.simulation.replay import EngineShape, replay
from jengine.capacity.simulation.summary import Targets, in_target
from jengine.capacity.simulation.trace import RequestTrace
from jengine.core.request import SamplingParams

LONELY = 200  # number of requests tried alone: if these miss their targets, more engines do not help
APART = 1e6  # seconds between these requests


def replicas_needed(
    shape: EngineShape,
    trace: RequestTrace,
    targets: Targets,
    *,
    params: SamplingParams | None = None,
    progress: bool = False,
) -> tuple[int, Outcome] | None:
    """The smallest number of engines that serves `targets.share` of the requests within targets, and the
    outcome; None: no number.

    Since replicas take turns, the search simulates a single one. The returned outcome includes all.
    """

    def enough(replicas: int) -> bool:
        outcome = replay(shape, trace, replicas=replicas, only=0, params=params, progress=progress)
        return bool(in_target(outcome, trace, targets)[::replicas].mean() >= targets.share)

    rows = np.unique(np.linspace(0, len(trace) - 1, LONELY).astype(int))
    alone = trace.take(rows)
    alone = replace(alone, arrivals=APART * np.arange(len(alone)))
    if in_target(replay(shape, alone, params=params), alone, targets).mean() < targets.share:
        return None
    low, high = 0, 1  # too few, and perhaps enough
    while high < len(trace) and not enough(high):
        low, high = high, 2 * high
    high = min(high, len(trace))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    while high <= len(trace):
        outcome = replay(shape, trace, replicas=high, params=params, progress=progress)
        if in_target(outcome, trace, targets).mean() >= targets.share:
            return high, outcome
        high += 1
    return None
