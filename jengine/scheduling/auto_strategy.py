"""strategy="auto": moves between the others on observed load."""

from __future__ import annotations

from typing import NamedTuple

from jengine.scheduling.options import StrategyName

HOLD = 2.0  # seconds that load must call for another strategy before it is taken
SHORT_PAGES, ENOUGH_PAGES = 0.10, 0.30  # shares of free pages at which memory begins and ends
OVERLOADED, RECOVERED = 0.5, 0.2  # shares of late requests at which latency ends and begins again


class LoadSigns(NamedTuple):
    """What was observed.

    Attributes:
        targets: whether any request that runs or waits has one.
        late: share of the last requests with targets that missed them.
        free_pages: share of the cache's pages.
        preempted: whether a sequence was preempted since the strategy was last looked at.
        waiting: requests.
    """

    targets: bool
    late: float
    free_pages: float
    preempted: bool
    waiting: int


class AutoState(NamedTuple):
    """Attributes:
    strategy: now in use.
    reason: why.
    wanted: another one that load calls for, `since` when; None: there is none.
    """

    strategy: StrategyName = "throughput"
    reason: str = "start"
    wanted: StrategyName | None = None
    since: float = 0.0


def auto(state: AutoState, signs: LoadSigns, now: float) -> AutoState:
    """The strategy for this load. It changes only when load has called for the same one for HOLD seconds; a preemption counts at once."""
    wanted, reason = _called_for(state.strategy, signs)
    if wanted == state.strategy:
        return state if state.wanted is None else state._replace(wanted=None)
    if wanted == "memory" and signs.preempted:
        return AutoState(wanted, reason)
    if state.wanted != wanted:
        return state._replace(wanted=wanted, since=now)
    return AutoState(wanted, reason) if now - state.since >= HOLD else state


def _called_for(strategy: StrategyName, signs: LoadSigns) -> tuple[StrategyName, str]:
    """Limits differ by the strategy in use, so that load near one of them does not move it back and forth."""
    if signs.preempted or (signs.free_pages < (ENOUGH_PAGES if strategy == "memory" else SHORT_PAGES) and signs.waiting):
        return "memory", "pages are short"
    if not signs.targets:
        return "throughput", "no targets"
    if signs.late > (OVERLOADED if strategy == "latency" else RECOVERED) and signs.waiting:
        return "throughput", "most requests are late anyway"
    return "latency", "targets can be met"
