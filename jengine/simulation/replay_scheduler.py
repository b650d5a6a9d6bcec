"""The real scheduler with additions for replays: reports ended sequences, and runs many steps at once if there
is nothing to decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine.scheduling.scheduler import NOTHING_FOUND, Scheduler
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.step_plan import StepPlan
from jengine.scheduling.work import NO_WORK, Work
from jengine.simulation.trace import OUTPUT_TOKEN
from jengine.updates import ScoredToken


class Preempted(Exception):
    """A sequence would be preempted."""


class ReplayScheduler(Scheduler):
    """A scheduler that can run steady steps quickly. A steady step has the same rows as the previous step, and no tiles.

    The little that `schedule` and `collect` do for such a step is done here: pages (`begin_steady_step`),
    predictions (`planned`, `collected`), and tokens, once for many steps (`advance`).

    Costs must not change, and are used under usual load.

    Attributes:
        no_preemptions: whether to raise Preempted instead of preempting.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.no_preemptions = False
        self._bases: dict[tuple[int, int, int, int], float] = {}  # seconds without work, by rows, tiles, page bucket and variant

    def collect(
        self, plan: StepPlan, tokens: list[list[int]], found: Mapping[int, ScoredToken] = NOTHING_FOUND
    ) -> list[tuple[int, Sequence, int]]:
        """Like Scheduler.collect, but faster if a step only decodes.

        In a replay, only its length ends a sequence, and the samples of decode rows are not needed.
        """
        if plan.trunk.tiles:
            return super().collect(plan, tokens, found)
        by_number, fair = self._by_number, self._fair
        self._timeline.collect(self.clock())
        for sample, own in zip(plan.samples, tokens, strict=True):
            sequence = by_number.get(sample.seq)
            if sequence is not None:
                known = sequence.tokens
                known += own
                sequence.in_flight -= 1
                if fair is not None:
                    fair.spend(sequence.client, 1)
                if len(known) == sequence.max_len:
                    self.finish(sequence, "length")
        return []

    def _preempt(self, sequence: Sequence) -> None:
        if self.no_preemptions:
            raise Preempted
        super()._preempt(sequence)

    def _seconds(self, rows: int, tiles: int, work: Work, tokens: int, rank: int = 0) -> float:
        """Like Targets._seconds, but looks up the programs only once, since costs do not change in a replay."""
        pages = self.table.page_bucket(self.blocks.pages_of(tokens), tiles)
        base = self._bases.get((rows, tiles, pages, rank))
        if base is None:
            base = self._bases[rows, tiles, pages, rank] = super()._seconds(rows, tiles, NO_WORK, tokens, rank)
        return base + self.costs.slopes.seconds(work)

    def steady_steps(self, ahead: int) -> int:
        """Number of the next steps that are steady if no request arrives that `admits`, limited by `begin_steady_step`.

        Args:
            ahead: number of dispatched steps that are not collected: 0 or 1.
        """
        rows = self._rows
        if not rows or len(rows) != len(self._running) or self._sharing:
            return 0
        if len(self._batches) and self._batches.batching != "static":
            return 0
        if self._waiting and (self._auto is not None or self.strategy == "latency" or (self._free_rows and self._may_admit())):
            return 0
        return min([s.last_position - s.num_computed for s in rows]) - (1 - ahead)

    def _may_admit(self) -> bool:
        """Whether the first waiting sequence can be admitted before a running one ends. Without windows, free
        pages only decrease."""
        first = self._waiting.first
        if self.strategy != "throughput" or first is None or first.in_flight or any(group.window for group in self.blocks.groups):
            return True
        return self._fits(self._needed(first, self._match(first)), len(self._running))

    @property
    def _free_rows(self) -> int:
        return min(len(self._free_slots), self.ready.max_rows - len(self._running))

    @property
    def admits(self) -> bool:
        """Whether an arriving request can change the next step. If not, it only joins the queue."""
        return self._free_rows > 0 or self._auto is not None or self.strategy == "latency" or self.options.batching != "continuous"

    def steady_rows(self) -> list[Sequence]:
        """Rows of the last step."""
        return self._rows

    def begin_steady_step(self, now: float, entering: list[Sequence] | None, steps: int) -> bool:
        """The first part of `schedule`. Returns False if the next step may not be steady, and `schedule` must plan it.

        Args:
            entering: rows that enter a page in this step.
            steps: number of steady steps since the last call of `schedule`.
        """
        if self._auto is not None:
            before = self.strategy
            self._begin_step(now)
            if self.strategy != before:
                return False
        blocks = self.blocks
        for s in entering or ():
            blocks.pass_windows(s.number, s.num_computed + steps)
        if not entering:
            return True
        if not blocks.available(blocks.new_pages(len(entering))):
            return False
        for s in entering:
            blocks.grow(s.number, s.num_computed + steps + 1)
        return True

    def planned(self, now: float, seconds: float) -> None:
        """A steady step has been planned."""
        self._timeline.plan(now, seconds)

    def collected(self, now: float) -> None:
        """The previous step has been collected or, without overlap, this one."""
        self._timeline.collect(now)

    def advance(self, steps: int, tokens: list[list[int]] | None) -> None:
        """Adds the tokens of `steps` steady steps, which have been planned and collected.

        Args:
            tokens: by sequence number, the token that each of these steps sampled; None: OUTPUT_TOKEN.
        """
        same = [OUTPUT_TOKEN] * steps
        for s in self._rows:
            s.num_computed += steps
            s.tokens += same if tokens is None else tokens[s.number] * steps
            if s.has_target:
                for _ in range(steps):  # one by one, so that sums of floats are the same
                    s.due += s.tpot
            if self._fair is not None:
                self._fair.spend(s.client, steps)
