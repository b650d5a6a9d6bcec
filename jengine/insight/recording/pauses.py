"""Pauses by Python's garbage collector, which stops every thread of the process."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from typing import Literal

from jengine.insight.recording.records import Pause

NOTED = 1e-3  # minimum seconds of a pause that is recorded separately
KEPT = 1024


class GarbagePauses:
    """Statistics of garbage collections.

    Attributes:
        seconds: total of all collections.
        by_generation: (number of collections, seconds) of each generation.
        longest: the most recent ones that took at least NOTED seconds.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_generation = ((0, 0.0),) * 3
        self.longest: deque[Pause] = deque(maxlen=KEPT)
        self._begun = 0.0

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """The callback for gc.callbacks. Collections do not nest."""
        if phase == "start":
            self._begun = time.perf_counter()
            return
        seconds, generation = time.perf_counter() - self._begun, info["generation"]
        self.seconds += seconds
        totals = [*self.by_generation]
        totals[generation] = totals[generation][0] + 1, totals[generation][1] + seconds
        self.by_generation = (totals[0], totals[1], totals[2])
        if seconds >= NOTED:
            thread = threading.current_thread().name
            self.longest.append(Pause(self._begun, seconds, generation, info["collected"], thread))


_pauses = GarbagePauses()
_lock = threading.Lock()


def garbage_pauses() -> GarbagePauses:
    """Statistics of this process, since the first call."""
    with _lock:
        if _pauses not in gc.callbacks:
            gc.callbacks.append(_pauses)
    return _pauses
