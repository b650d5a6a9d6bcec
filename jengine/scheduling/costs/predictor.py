"""Predicted seconds of steps that could be planned, and which programs compute a prompt in fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.batching import Composition
from jengine.scheduling.step_plan import NO_WORK, Windows, Work, further_work, pairs, rows_work
from jengine.table.program_table import VARIANTS, TrunkKey
from jengine.table.ready_programs import ReadyPrograms


class StepPredictor:
    """Looks up what steps would cost with the programs that are ready.

    Attributes:
        ready: programs that steps may use; replaced when more become ready.
        tile_size: tokens in a tile.
        max_num_batched_tokens: maximum tokens in a step.
        adapted: the highest place of an adapter in steps, as far as is known; 0: they have none.
    """

    def __init__(
        self,
        ready: ReadyPrograms,
        costs: StepCosts,
        blocks: BlockManager,
        composition: Composition,
        max_num_batched_tokens: int,
    ) -> None:
        self.ready, self.costs = ready, costs
        self.adapted = 0
        self.tile_size, self.max_num_batched_tokens = ready.table.tile_size, max_num_batched_tokens
        self._blocks, self._apart = blocks, composition.apart

    def tile_buckets(self, rows: int) -> list[int]:
        """Tile counts of programs that can run beside this many rows."""
        limit = max((self.max_num_batched_tokens - rows) // self.tile_size, 1)
        return [tiles for tiles in self.ready.tile_buckets if tiles <= limit] or [self.ready.tile_buckets[0]]

    def row_buckets(self, rows: int, tiles: int) -> list[int]:
        """Row counts, from this one on, of programs that can run beside this many tiles."""
        table = self.ready.table
        buckets = table.mixed_row_buckets if tiles and not self._apart else table.row_buckets
        return [bucket for bucket in buckets if rows <= bucket <= self.ready.max_rows]

    def room(self, rows: int, tiles: int) -> int:
        """Number of tokens that max_num_batched_tokens leaves beside these."""
        return self.max_num_batched_tokens - rows - tiles * self.tile_size

    def pages(self, tokens: int) -> int:
        """Number of pages of a sequence of this length."""
        return self._blocks.pages_of(tokens)

    def seconds(self, rows: int, tiles: int, work: Work, tokens: int, rank: int = 0) -> float:
        """Predicted seconds of a step, or of two if rows and tiles are kept apart.

        Args:
            tokens: length of the step's longest sequence.
            rank: of the sampler variant; see Sequence.
        """
        if rows and tiles and self._apart:
            alone = work._replace(attended=0)
            return self.seconds(rows, 0, alone, tokens, rank) + self.seconds(
                0, tiles, Work(attended=work.attended), tokens, rank
            )
        trunk = self._trunk(max(rows, 0 if tiles else 1), tiles, tokens)
        return self.costs.seconds(trunk, self.ready.sampler(trunk, VARIANTS[rank]), work)

    def row_seconds(self, rows: int, tokens: int, rank: int = 0) -> float:
        """Seconds of a step of rows alone, without work; of one step of a burst if they may run as one."""
        seconds, steps = self.seconds(rows, 0, NO_WORK, tokens, rank), self.ready.table.steps
        if steps == 1:
            return seconds
        burst = self.ready.burst(self._trunk(rows, 0, tokens), VARIANTS[rank])
        return seconds if burst is None else min(seconds, self.costs.added_seconds(burst) / steps)

    def _trunk(self, rows: int, tiles: int, tokens: int) -> TrunkKey:
        return self.ready.trunk(rows, tiles, self.pages(tokens), adapted=self.adapted)

    def draft_seconds(self, rows: int, tokens: int) -> float:
        """Predicted seconds that a draft model adds to a step, for this many sequences. tokens: length of the
        longest.
        """
        return self.costs.added_seconds(self.ready.draft(rows, self._blocks.pages_of(tokens)))

    def prompt_seconds(self, tokens: int) -> float:
        """Predicted seconds of a prompt alone."""
        max_tiles = self.tile_buckets(0)[-1]
        steps, rest = divmod(-(-tokens // self.tile_size), max_tiles)
        return steps * self.seconds(0, max_tiles, Work(), tokens) + (
            self.seconds(0, rest, Work(), tokens) if rest else 0.0
        )


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
            work = work.plus(rows_work([start], self._windows))
            work = work.plus(further_work(start + 1, length - 1, self._windows))
            work = work.plus(Work(attended=-pairs(start, length, self._windows)))
        return work
