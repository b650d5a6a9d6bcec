"""strategy="auto": chooses among the other strategies by observed load."""

from __future__ import annotations

from typing import NamedTuple

from jengine.core.scheduling_options import StrategyName

HOLD = 2.0  # seconds for which the load must call for another strategy before it is adopted
SHORT_PAGES, ENOUGH_PAGES = 0.10, 0.30  # shares of free pages at which the memory strategy begins and ends
OVERLOADED, RECOVERED = 0.5, 0.2  # shares of late requests at which the latency strategy ends and resumes


class LoadSigns(NamedTuple):
    """Observed load.

    Attributes:
        targets: whether any running or waiting request has targets.
        late: share of recent requests with targets that missed them.
        free_pages: share of the cache's pages that are free.
        preempted: whether a sequence was preempted since the last call.
        waiting: number of waiting requests.
    """

    targets: bool
    late: float
    free_pages: float
    preempted: bool
    waiting: int


class AutoState(NamedTuple):
    """The strategy in use.

    Attributes:
        strategy: its name.
        reason: why it was chosen.
        wanted: another strategy that the load calls for; None: there is none.
        since: the time at which the load began to call for `wanted`.
    """

    strategy: StrategyName = "throughput"
    reason: str = "start"
    wanted: StrategyName | None = None
    since: float = 0.0


def auto(state: AutoState, signs: LoadSigns, now: float) -> AutoState:
    """Chooses the strategy for this load.

    The strategy changes only after the load has called for the same other one for HOLD seconds. A preemption
    counts immediately.
    """
    wanted, reason = _called_for(state.strategy, signs)
    if wanted == state.strategy:
        return state if state.wanted is None else state._replace(wanted=None)
    if wanted == "memory" and signs.preempted:
        return AutoState(wanted, reason)
    if state.wanted != wanted:
        return state._replace(wanted=wanted, since=now)
    return AutoState(wanted, reason) if now - state.since >= HOLD else state


def _called_for(strategy: StrategyName, signs: LoadSigns) -> tuple[StrategyName, str]:
    """Thresholds depend on the current strategy (hysteresis), so a load near one of them does not cause
    oscillation.
    """
    if signs.preempted or (
        signs.free_pages < (ENOUGH_PAGES if strategy == "memory" else SHORT_PAGES) and signs.waiting
    ):
        return "memory", "pages are short"
    if not signs.targets:
        return "throughput", "no targets"
    if signs.late > (OVERLOADED if strategy == "latency" else RECOVERED) and signs.waiting:
        return "throughput", "most requests are late anyway"
    return "latency", "targets can be met"
