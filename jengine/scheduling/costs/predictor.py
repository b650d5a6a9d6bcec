"""Predicted seconds of steps that could be planned."""

from __future__ import annotations

from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.batching import Composition
from jengine.scheduling.work import NO_WORK, Work
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
        """Seconds of a step of rows alone, without work; if they may run as a burst, seconds of one of its
        steps.
        """
        seconds, steps = self.seconds(rows, 0, NO_WORK, tokens, rank), self.ready.table.steps
        if steps == 1:
            return seconds
        burst = self.ready.burst(self._trunk(rows, 0, tokens), VARIANTS[rank])
        return seconds if burst is None else min(seconds, self.costs.burst_seconds(burst) / steps)

    def _trunk(self, rows: int, tiles: int, tokens: int) -> TrunkKey:
        return self.ready.trunk(rows, tiles, self.pages(tokens), adapted=self.adapted)

    def draft_seconds(self, rows: int, tokens: int) -> float:
        """Predicted seconds that a draft model adds to a step, for this many sequences.

        Args:
            tokens: length of the longest.
        """
        return self.costs.draft_seconds(self.ready.draft(rows, self._blocks.pages_of(tokens)))

    def prompt_seconds(self, tokens: int) -> float:
        """Predicted seconds of a prompt alone."""
        max_tiles = self.tile_buckets(0)[-1]
        steps, rest = divmod(-(-tokens // self.tile_size), max_tiles)
        return steps * self.seconds(0, max_tiles, Work(), tokens) + (
            self.seconds(0, rest, Work(), tokens) if rest else 0.0
        )
