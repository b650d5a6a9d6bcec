"""What a step should hold, by what it costs: small pure functions, one for each strategy.

All take plain data and return a decision with its reason, which is counted. Seconds are those that the cost model predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jengine.scheduling.promises import EPSILON, Outlook, best_way

Seconds = Callable[[int, int], float]  # of a step with this many decode rows and prompt tiles
MARGIN = 0.95  # of the time in one batch that several must stay below: costs are not exact, and those that wait longer get nothing for it


class Situation(NamedTuple):
    """A step that is to be composed.

    Attributes:
        rows: sequences that decode in it.
        pending: prompt tiles that can be worked on, at least 1.
        tile_size: tokens of a tile.
        buckets: tiles of the programs that can be used.
        outlook: targets of those that run and wait, for `latency`.
    """

    rows: int
    pending: int
    tile_size: int
    buckets: Sequence[int]
    seconds: Seconds
    outlook: Outlook | None = None


class Decision(NamedTuple):
    """How many prompt tiles run beside the decode rows, and why."""

    tiles: int
    reason: str


def throughput(situation: Situation) -> Decision:
    """The most useful tokens a second: decode rows, and the tiles that fill the program's bucket; padding is not useful.

    With 5 tiles pending, 4 in a bucket of 4 may beat 5 in a bucket of 8; the larger of equals wins. At least one tile runs, so
    prompts never starve.
    """
    best, best_rate = 0, 0.0
    for bucket in situation.buckets:
        tiles = min(bucket, situation.pending)
        rate = (situation.rows + tiles * situation.tile_size) / situation.seconds(situation.rows, tiles)
        if rate >= best_rate:
            best, best_rate = tiles, rate
        if bucket >= situation.pending:
            break
    return Decision(best, "most tokens a second")


def latency(situation: Situation) -> Decision:
    """The way in which the fewest requests miss their targets: prompts at once, or at the pace that running streams allow."""
    outlook = situation.outlook
    if outlook is None or not outlook.targets:
        return throughput(situation)._replace(reason="no targets")
    way = best_way(outlook, situation.buckets)
    tiles = min(way.tiles, situation.pending)
    if way.burst or situation.seconds(situation.rows, tiles) <= outlook.slack + EPSILON:
        return Decision(tiles, "all in time" if not way.late else "some late")
    return Decision(0, "streams first" if not way.late else "streams first, some late")


def batch_size(wanting: int, most: int, sizes: Sequence[int], seconds: Seconds) -> int:
    """How many sequences to run at once, of those that run or wait: as many as get all of them done soonest, batch after batch.

    A program takes as long with one row as with all of its rows, so that nine sequences may be done sooner as eight and one than in a
    program of sixteen rows.

    Args:
        wanting: sequences that run or wait.
        most: that can run at once.
        sizes: rows of the programs that can be used.
    """

    def whole(size: int) -> float:
        batches, rest = divmod(wanting, size)
        return batches * seconds(size, 0) + (seconds(rest, 0) if rest else 0.0)

    largest = min(wanting, most)
    best = min([size for size in sizes if size < largest] or [largest], key=lambda size: (whole(size), -size))
    return best if whole(best) < MARGIN * whole(largest) else largest
