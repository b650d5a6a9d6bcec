"""Strategies that choose the contents of a step by cost: one small pure function each.

All take plain data and return a decision with its reason, which is counted. The cost model predicts the
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jengine.core.scheduling_options import StrategyName
from jengine.scheduling.promises.promises import EPSILON, Outlook, best_way

Seconds = Callable[[int, int], float]  # of a step with this many decode rows and prompt tiles
# several batches must take less than this share of one batch's time, since costs are inexact and later
# batches wait longer
MARGIN = 0.95


HOLD = 2.0  # seconds for which the load must call for another strategy before it is adopted
SHORT_PAGES, ENOUGH_PAGES = 0.10, 0.30  # shares of free pages at which the memory strategy begins and ends
OVERLOADED, RECOVERED = 0.5, 0.2  # shares of late requests at which the latency strategy ends and resumes


class Situation(NamedTuple):
    """A step to compose.

    Attributes:
        rows: number of decoding sequences.
        pending: number of prompt tiles that can be computed, at least 1.
        tile_size: tokens in a tile.
        buckets: tile counts of usable programs.
        outlook: targets of running and waiting requests, for `latency`.
        idle: number of slots without a row, if more requests wait than there are slots; otherwise 0.
        lost: seconds that idle slots have cost since the pending prompts began to wait for further ones.
        padded: seconds of a step whose tiles are all padding.
    """

    rows: int
    pending: int
    tile_size: int
    buckets: Sequence[int]
    seconds: Seconds
    outlook: Outlook | None = None
    idle: int = 0
    lost: float = 0.0
    padded: Seconds | None = None


class Decision(NamedTuple):
    """Number of prompt tiles to run beside the decode rows, and the reason. lost: see `Situation`."""

    tiles: int
    reason: str
    lost: float = 0.0


def throughput(situation: Situation) -> Decision:
    """The most useful tokens a second: decode rows and the tiles that fit the program's bucket. Padding is
    not useful.

    With 5 tiles pending, 4 in a bucket of 4 may beat 5 in a bucket of 8. Ties go to the larger bucket. At
    least one tile runs, so prompts never starve.
    """
    best = best_tiles(*situation[:5])
    lost = _lost_by_waiting(situation, best)
    return Decision(best, "most tokens a second") if lost is None else Decision(0, "prompts gather", lost)


def best_tiles(rows: int, pending: int, tile_size: int, buckets: Sequence[int], seconds: Seconds) -> int:
    """The number of pending tiles with the most useful tokens a second. Arguments: fields of `Situation`."""
    best, best_rate = 0, 0.0
    for bucket in buckets:
        tiles = min(bucket, pending)
        rate = (rows + tiles * tile_size) / seconds(rows, tiles)
        if rate >= best_rate:
            best, best_rate = tiles, rate
        if bucket >= pending:
            break
    return best


def _lost_by_waiting(situation: Situation, tiles: int) -> float | None:
    """Total seconds lost if these tiles wait one more step for further prompts; None: they should run now.

    A larger program may take less time for each tile, but when slots become free is unknown. So prompts wait
    until idle slots have cost as much time as full programs would save. At worst, that cost is paid twice
    (the ski rental problem).
    """
    rows, padded = situation.rows, situation.padded
    larger = [bucket for bucket in situation.buckets if bucket > tiles]
    if not (rows and situation.idle and larger and padded):
        return None
    alone = padded(rows, 0)
    saved = padded(rows, tiles) - alone - min((padded(rows, n) - alone) / n for n in larger) * tiles
    lost = situation.lost + situation.idle * alone / rows
    return lost if lost < saved else None


def latency(situation: Situation) -> Decision:
    """The way with the fewest late requests: prompts at once, or at a pace that streams allow."""
    outlook = situation.outlook
    if outlook is None or not outlook.targets:
        return throughput(situation)._replace(reason="no targets")
    way = best_way(outlook, situation.buckets)
    tiles = min(way.tiles, situation.pending)
    if way.burst or situation.seconds(situation.rows, tiles) <= outlook.slack + EPSILON:
        return Decision(tiles, "all in time" if not way.late else "some late")
    return Decision(0, "streams first" if not way.late else "streams first, some late")


def batch_size(wanting: int, limit: int, sizes: Sequence[int], seconds: Seconds) -> int:
    """Number of sequences to run at once so that all finish soonest, batch after batch.

    A program takes the same time for one row as for all of its rows. So nine sequences may finish sooner as
    eight and one than in a program of sixteen rows.

    Args:
        wanting: number of running and waiting sequences.
        limit: maximum number of running sequences.
        sizes: row counts of usable programs.
    """

    def whole(size: int) -> float:
        batches, rest = divmod(wanting, size)
        return batches * seconds(size, 0) + (seconds(rest, 0) if rest else 0.0)

    largest = min(wanting, limit)
    best = min([size for size in sizes if size < largest] or [largest], key=lambda size: (whole(size), -size))
    return best if whole(best) < MARGIN * whole(largest) else largest


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
    """Thresholds depend on the current strategy, so a load near one of them does not cause oscillation."""
    if signs.preempted or (
        signs.free_pages < (ENOUGH_PAGES if strategy == "memory" else SHORT_PAGES) and signs.waiting
    ):
        return "memory", "pages are short"
    if not signs.targets:
        return "throughput", "no targets"
    if signs.late > (OVERLOADED if strategy == "latency" else RECOVERED) and signs.waiting:
        return "throughput", "most requests are late anyway"
    return "latency", "targets can be met"
