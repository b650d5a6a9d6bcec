"""The host tier on a virtual clock: page copies take the measured time and then finish."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from jengine.scheduling.costs.step_costs import StepCosts, SwapCosts
from jengine.scheduling.scheduler import Scheduler
from jengine.table.pages import SWAPS


class Copies(NamedTuple):
    """Page copies that finish together: spills into these host pages, fetches into these places."""

    done: float
    saved: list[int]
    staged: list[int]


class VirtualHost:
    """Stands for execution's host store. Copies run one after the other, in parallel with steps."""

    def __init__(self, scheduler: Scheduler, costs: StepCosts) -> None:
        self._scheduler, self._costs = scheduler, costs.swaps or SwapCosts()
        self._under_way: deque[Copies] = deque()

    @property
    def next_done(self) -> float:
        """Time at which the next copies finish; inf: there are none."""
        return self._under_way[0].done if self._under_way else float("inf")

    def report(self, now: float) -> None:
        """Tells the scheduler which copies have finished. To be called before each step is planned."""
        while self._under_way and self._under_way[0].done <= now:
            _, saved, staged = self._under_way.popleft()
            self._scheduler.swapped(saved, staged)

    def begin(self, now: float) -> float:
        """Begins the copies that the scheduler has planned with a step. Returns the seconds that they add to
        it.
        """
        swaps = self._scheduler.take_swaps()
        if swaps is None:
            return 0.0
        spills, fetches = [host for _, _, host in swaps.spills], [place for _, place in swaps.fetches]
        if spills or fetches:
            begin = max(now, self._under_way[-1].done if self._under_way else now)
            seconds = _batches(len(spills)) * self._costs.spill + _batches(len(fetches)) * self._costs.fetch
            self._under_way.append(Copies(begin + seconds, spills, fetches))
        return _batches(len(spills)) * self._costs.spill + _batches(len(swaps.fills)) * self._costs.fill


def _batches(pages: int) -> int:
    return -(-pages // SWAPS)
