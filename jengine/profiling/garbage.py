"""Every collection of Python's garbage collector while a profile is taken, and the thread that it stopped the others in."""

from __future__ import annotations

import gc
import threading
import time
from typing import Literal

from jengine.profiling.data import Collection

NOTED, KEPT = 1e-4, 20_000  # seconds from which on a collection is listed, and how many are


class Collections:
    """Listens from `start` until `stop`.

    Attributes:
        listed: the longer ones.
        pauses: of all, by generation: how many, and seconds.
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
            return  # it began before this
        seconds, generation = time.perf_counter() - self._begun, info["generation"]
        count, total = self.pauses[generation]
        self.pauses[generation] = count + 1, total + seconds
        if seconds >= NOTED and len(self.listed) < KEPT:
            thread = threading.current_thread().name
            self.listed.append(Collection(self._begun, seconds, generation, info["collected"], thread))
        self._begun = 0.0
