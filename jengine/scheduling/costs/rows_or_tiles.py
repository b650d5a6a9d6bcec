"""Whether the last tokens of prompts are computed faster on rows or in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.work import Windows, Work, further_work, pairs, rows_work


class ChunkEnd(NamedTuple):
    """The tokens of a prompt's chunk that do not fill a tile.

    Attributes:
        start: position of the first.
    """

    length: int
    start: int


class RowsOrTiles:
    """Compares steps that lay the ends of chunks on rows with those that give each a tile.

    Args:
        windows: of the cache groups.
        max_rows: maximum number of tokens of an end that may lie on rows; 0: none.
    """

    def __init__(self, predictor: StepPredictor, windows: Windows, max_rows: int) -> None:
        self._predictor, self._windows, self.max_rows = predictor, windows, max_rows

    def fits(self, length: int) -> bool:
        """Whether an end of this many tokens may lie on rows."""
        return 0 < length <= self.max_rows

    def best(
        self, rows: int, tiles: int, work: Work, tokens: int, ends: Sequence[ChunkEnd], rank: int = 0
    ) -> tuple[int, float]:
        """How many of the ends, the shortest first, to lay on rows, and predicted seconds of that step.

        Only numbers that leave a bucket of tiles are considered, since others save nothing.

        Args:
            rows: rows that the step has anyway.
            tiles: its tiles if no end lies on rows.
            work: its work in that case.
            tokens: length of its longest sequence.
            ends: those that may lie on rows, sorted.
            rank: see StepPredictor.seconds.
        """
        predictor = self._predictor
        best, seconds = 0, predictor.seconds(rows, tiles, work, tokens, rank)
        for bucket in (0, *predictor.ready.tile_buckets):
            moved = ends[: max(tiles - bucket, 0)]
            more = sum([end.length for end in moved])
            if not moved or len(moved) < tiles - bucket or rows + more > predictor.ready.max_rows:
                continue
            on_rows = predictor.seconds(rows + more, bucket, self.moved(work, moved), tokens, rank)
            if on_rows < seconds:
                best, seconds = len(moved), on_rows
        return best, seconds

    def moved(self, work: Work, ends: Sequence[ChunkEnd]) -> Work:
        """A step's work once these ends lie on rows."""
        for length, start in ends:
            context, longest = rows_work([start], self._windows)
            further, last = further_work(start + 1, length - 1, self._windows)
            attended = work.attended - pairs(start, length, self._windows)
            work = Work(work.context + context + further, max(work.longest, longest, last), attended)
        return work
