"""A step plan under construction."""

from __future__ import annotations

from collections.abc import Iterable

from jengine.scheduling.pages.block_table import Entry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Sample, SlotReset, Span, StepPlan
from jengine.scheduling.work import NO_WORK
from jengine.table.program_table import SamplerKey, TrunkKey


class PlanBuilder:
    """The parts of a StepPlan, and the sequences behind them.

    Attributes:
        now: time of planning.
        rows: decoding sequences, whose spans come first.
        more_rows: number of rows beyond one for each of these.
        tiles: number of prompt tiles.
        longest: length in tokens of the longest sequence after the step; in a burst, after its first step.
        steps: number of decode steps; more than 1 in a burst.
        lengthened: whether a rule has given rows several tokens.
        guesses: number of drafts.
        paced: whether any row has a target for the time between tokens.
        adapted: the highest place of an adapter of its sequences; 0: none has one.
        rank: highest variant_rank of the sequences that are sampled.
        sampled: sequences that get tokens, in the order of `samples`.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.rows: list[Sequence] = []
        self.more_rows = self.tiles = self.longest = self.rank = self.guesses = 0
        self.steps, self.lengthened, self.paced, self.adapted = 1, False, False, 0
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.sampled: list[Sequence] = []
        self.resets: list[SlotReset] = []
        self.table: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.work = NO_WORK

    def enter(self, slot: int, entries: Iterable[Entry]) -> None:
        """Updates a slot's block tables."""
        self.table += [(group, slot, index, page) for group, index, page in entries]

    def build(self, trunk: TrunkKey, sampler: SamplerKey) -> StepPlan:
        """The finished plan for these programs."""
        return StepPlan(
            trunk=trunk,
            sampler=sampler,
            spans=self.spans,
            samples=self.samples,
            resets=self.resets,
            table=self.table,
            copies=self.copies,
            work=self.work,
            steps=self.steps,
            prompts=len(self.spans) - len(self.rows),
            rows=len(self.rows) + self.more_rows,
            guesses=self.guesses,
        )
