"""What a step costs, and how many prompt tiles are worth their time."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.program_table import ProgramTable, TrunkKey
from jengine.ready_programs import ReadyPrograms

# The estimate before anything is measured. Only the ratio matters: a step's fixed cost is that of 50 tokens.
STEP_SECONDS = 1e-3
TOKEN_SECONDS = 2e-5


@dataclass(slots=True)
class StepCosts:
    """Seconds a trunk takes: measured at warm-up or learned from steps, else estimated as linear in its tokens, padding included.

    Attributes:
        measured: at warm-up, each on padding, fastest of several runs.
        learned: of trunks that became ready later, the fastest step so far.
    """

    measured: dict[TrunkKey, float] = field(default_factory=dict)
    learned: dict[TrunkKey, float] = field(default_factory=dict)

    def seconds(self, table: ProgramTable | ReadyPrograms, key: TrunkKey) -> float:
        known = self.measured.get(key) or self.learned.get(key)
        return self._scale(table) * _linear(table, key) if known is None else known

    def learn(self, key: TrunkKey, seconds: float) -> None:
        """Note what a step took from the end of the one before it, or from its dispatch where none ran, until its tokens were read."""
        if key not in self.measured:
            self.learned[key] = min(seconds, self.learned.get(key, seconds))

    def _scale(self, table: ProgramTable | ReadyPrograms) -> float:
        """How much slower this machine is than the estimate, by the trunks that are known."""
        known = {**self.learned, **self.measured}
        return sum(known.values()) / sum(_linear(table, key) for key in known) if known else 1.0

    def best_tiles(self, table: ProgramTable | ReadyPrograms, *, rows: int, pending: int, pages: int) -> int:
        """How many of `pending` tiles (at least 1) to run beside `rows` decode rows.

        The bucket with the most useful tokens a second wins, the larger of equals. Useful are the rows
        and the tiles that fill the bucket; padding is not: with 5 tiles pending, 4 in a bucket of 4 may
        beat 5 in a bucket of 8. At least one tile always runs, so prompts never starve.
        """
        best_tiles, best_rate = 0, 0.0
        for bucket in table.tile_buckets:
            tiles = min(bucket, pending)
            rate = (rows + tiles * table.tile_size) / self.seconds(table, table.trunk(rows, bucket, pages))
            if rate >= best_rate:
                best_tiles, best_rate = tiles, rate
            if bucket >= pending:
                break
        return best_tiles


def _linear(table: ProgramTable | ReadyPrograms, key: TrunkKey) -> float:
    return STEP_SECONDS + TOKEN_SECONDS * table.tokens(key)
