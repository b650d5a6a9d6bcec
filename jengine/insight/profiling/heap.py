"""Growth of the heap between two snapshots of tracemalloc."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

from jengine.insight.profiling.data import HeapGrowth

MOST = 20  # lines
SETTLE = 0.2  # share of the time before the first snapshot, so that temporary allocations are in both
OTHERS = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]


def heap_growth(seconds: float, wait: Callable[[float], object]) -> tuple[list[HeapGrowth], float]:
    """Lines that have grown in this period, the largest first, and the seconds between the snapshots. Slows
    allocations, and sees only those made meanwhile, unless tracemalloc is already on.
    """
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        wait(SETTLE * seconds)
        before, begun = tracemalloc.take_snapshot(), time.perf_counter()
        wait((1.0 - SETTLE) * seconds)
        after, elapsed = tracemalloc.take_snapshot(), time.perf_counter() - begun
    finally:
        if not tracing:
            tracemalloc.stop()
    grown = after.filter_traces(OTHERS).compare_to(before.filter_traces(OTHERS), "lineno")
    lines = [line for line in grown if line.size_diff > 0][:MOST]
    return [HeapGrowth(_name(line.traceback[0]), line.size_diff, line.count_diff) for line in lines], elapsed


def _name(frame: tracemalloc.Frame) -> str:
    return "/".join(frame.filename.split("/")[-3:]) + f":{frame.lineno}"
