"""Growth of the heap between two snapshots of tracemalloc."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

from jengine.insight.profiling.data import HeapGrowth

MOST = 20  # lines
SETTLE = 0.2  # share of the time before the first snapshot, so that temporary allocations are in both


class Heap:
    """Compares the heap at `first` and `last`. Sees only allocations after `start`."""

    def __init__(self) -> None:
        self._ours = not tracemalloc.is_tracing()
        self._first: tracemalloc.Snapshot | None = None
        self._at = self.seconds = 0.0

    def start(self) -> None:
        if self._ours:
            tracemalloc.start(1)

    def first(self) -> None:
        self._first, self._at = tracemalloc.take_snapshot(), time.perf_counter()

    def last(self) -> list[HeapGrowth]:
        """Lines that have grown since `first`, the largest first. Ends tracing, unless it was already on
        before.
        """
        assert self._first is not None
        snapshot, self.seconds = tracemalloc.take_snapshot(), time.perf_counter() - self._at
        if self._ours:
            tracemalloc.stop()
        grown = snapshot.filter_traces(_OTHERS).compare_to(self._first.filter_traces(_OTHERS), "lineno")
        found = [one for one in grown if one.size_diff > 0][:MOST]
        return [HeapGrowth(_line(one.traceback[0]), one.size_diff, one.count_diff) for one in found]


_OTHERS = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]


def _line(frame: tracemalloc.Frame) -> str:
    return "/".join(frame.filename.split("/")[-3:]) + f":{frame.lineno}"


def measure(seconds: float, wait: Callable[[float], object]) -> tuple[list[HeapGrowth], float]:
    """The growth in this period, and the seconds between the snapshots."""
    heap = Heap()
    heap.start()
    wait(SETTLE * seconds)
    heap.first()
    wait((1.0 - SETTLE) * seconds)
    return heap.last(), heap.seconds
