"""Records garbage collections during a profile, and the thread that caused each of them."""

from __future__ import annotations

import gc
import threading
import time
from typing import Literal

from jengine.insight.profiling.data import Collection

NOTED, KEPT = 1e-4, 20_000  # minimum seconds of a listed collection, and maximum number of them


class Collections:
    """Records from `start` until `stop`.

    Attributes:
        listed: the longer ones.
        pauses: (count, seconds) of all collections, by generation.
    """

    def __init__(self) -> None:
        self.listed: list[Collection] = []
        self.pauses = [(0, 0.0)] * 3
        self._begun = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._heard)

    def stop(self) -> None:
        gc.callbacks.remove(self._heard)

    def _heard(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
            return
        if not self._begun:
            return  # it began before `start`
        seconds, generation = time.perf_counter() - self._begun, info["generation"]
        count, total = self.pauses[generation]
        self.pauses[generation] = count + 1, total + seconds
        if seconds >= NOTED and len(self.listed) < KEPT:
            thread = threading.current_thread().name
            self.listed.append(Collection(self._begun, seconds, generation, info["collected"], thread))
        self._begun = 0.0
