"""The real scheduler, with what a replay asks of it: whom it has ended, and many steps at once where it has nothing to decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jengine.scheduling.scheduler import NOTHING_FOUND, Scheduler
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.step_plan import StepPlan
from jengine.scheduling.work import NO_WORK, Work
from jengine.simulation.trace import OUTPUT_TOKEN
from jengine.updates import Found


class Preempted(Exception):
    """A sequence would have been preempted."""


class ReplayScheduler(Scheduler):
    """A steady step has the rows of the one before it and nothing else. What `schedule` and `collect` do then is little, and is done
    here: pages (`begin_steady_step`), predictions (`planned`, `collected`), and tokens, once for many steps (`advance`).

    Costs must stay as they are, on a machine as busy as usual.

    Attributes:
        no_preemptions: raise Preempted instead.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.no_preemptions = False
        self._bases: dict[tuple[int, int, int, int], float] = {}  # seconds without work, by rows, tiles, page bucket and variant

    def collect(
        self, plan: StepPlan, tokens: list[list[int]], found: Mapping[int, Found] = NOTHING_FOUND
    ) -> list[tuple[int, Sequence, int]]:
        """The same as ever, but shorter where a step only decodes: no token of a replay ends a sequence, only its length does, and
        what comes of decode rows is of no interest."""
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
        """The same as ever, but which programs it is about is looked up once: costs do not change in a replay."""
        pages = self.table.page_bucket(self.blocks.pages_of(tokens))
        base = self._bases.get((rows, tiles, pages, rank))
        if base is None:
            base = self._bases[rows, tiles, pages, rank] = super()._seconds(rows, tiles, NO_WORK, tokens, rank)
        return base + self.costs.slopes.seconds(work)

    def steady_steps(self, ahead: int) -> int:
        """How many of the next steps are steady, if no request comes that `admits`, and as far as `begin_steady_step` allows.

        Args:
            ahead: steps that are dispatched and not collected: 0 or 1.
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
        """Whether the first of those waiting can be admitted before a running sequence ends. Without windows, pages only become fewer."""
        first = self._waiting.first
        if self.strategy != "throughput" or first is None or first.in_flight or any(group.window for group in self.blocks.groups):
            return True
        return self._fits(self._needed(first, self._match(first)), len(self._running))

    @property
    def _free_rows(self) -> int:
        return min(len(self._free_slots), self.ready.max_rows - len(self._running))

    @property
    def admits(self) -> bool:
        """Whether a request that comes now can change the next step. If not, it only joins those waiting."""
        return self._free_rows > 0 or self._auto is not None or self.strategy == "latency" or self.options.batching != "continuous"

    def steady_rows(self) -> list[Sequence]:
        """The rows of the last step."""
        return self._rows

    def begin_steady_step(self, now: float, entering: list[Sequence] | None, steps: int) -> bool:
        """What `schedule` does first. False: the next step may be another one, and `schedule` has to plan it.

        Args:
            entering: rows that enter a page in this step.
            steps: steady steps since the last call of `schedule`.
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
        """A steady step was planned."""
        self._timeline.plan(now, seconds)

    def collected(self, now: float) -> None:
        """And the one before it collected, or, without overlap, this one."""
        self._timeline.collect(now)

    def advance(self, steps: int, tokens: list[list[int]] | None) -> None:
        """So many steady steps were planned, and as many collected.

        Args:
            tokens: by sequence number, the one that each of these steps sampled; None: OUTPUT_TOKEN.
        """
        same = [OUTPUT_TOKEN] * steps
        for s in self._rows:
            s.num_computed += steps
            s.tokens += same if tokens is None else tokens[s.number] * steps
            if s.has_target:
                for _ in range(steps):  # not once for all: sums of floats must come out the same
                    s.due += s.tpot
            if self._fair is not None:
                self._fair.spend(s.client, steps)
