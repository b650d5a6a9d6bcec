"""Decides how many waiting requests may run, from the batching mode and the strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from itertools import islice

from jengine.scheduling.auto_strategy import AutoState, LoadSigns, auto
from jengine.scheduling.batching import Batches
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.options import SchedulingOptions, StrategyName
from jengine.scheduling.page_forecast import Growth, peak_pages
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.strategies import Decision, batch_size
from jengine.scheduling.targets import Targets
from jengine.scheduling.work import Work
from jengine.table.pages import most_pages
from jengine.table.ready_programs import ReadyPrograms


class Admissions(Targets):
    """Sequences, and the number of waiting sequences that may run.

    Attributes:
        decisions: number of steps with prompts, by strategy and reason.
        decision: the last of them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        sequence: SequenceLimits,
        *,
        ready: ReadyPrograms,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        costs: StepCosts,
        clock: Callable[[], float],
        options: SchedulingOptions,
    ) -> None:
        super().__init__(
            blocks,
            sequence,
            ready=ready,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            costs=costs,
            clock=clock,
            options=options,
        )
        self.decision: Decision | None = None
        self.decisions: Counter[str] = Counter()
        self._batches = Batches(options.batching, max_num_seqs, options.batch_wait_ms / 1e3)
        self._auto: AutoState | None = None
        self._preemptions_seen = 0
        self._full: tuple[int, int] | None = None  # (number of the first waiting sequence, releases) when pages were last insufficient
        self.set_strategy(options.strategy)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._batches)

    @property
    def waiting(self) -> list[Sequence]:
        """See Sequences. Sequences held back for a batch come last."""
        return [*self._waiting, *self._batches]

    @property
    def wakes_at(self) -> float:
        """Time on the clock at which there may be work to schedule even if nothing is collected or added; inf: never."""
        if self._waiting and not self._running and self._judging:
            return self.clock()
        return math.inf if self._waiting or (self._running and self._batches.batching == "static") else self._batches.forms_at

    @property
    def busy_seconds(self) -> float:
        """Seconds until the device has finished all planned steps."""
        now = self.clock()
        return max(self._timeline.start(now) - now, 0.0)

    def snapshot(self) -> tuple[list[Sequence], list[Sequence]]:
        """See Sequences. Sequences held back for a batch count as waiting."""
        running, waiting = super().snapshot()
        return running, [*waiting, *[*self._batches]]

    def set_strategy(self, name: StrategyName) -> None:
        """Takes effect at the next step. The name must be one that `options` allows."""
        self._auto = AutoState(self.strategy) if name == "auto" else None
        self._use(self.strategy if name == "auto" else name)

    def _use(self, strategy: StrategyName) -> None:
        if strategy != self.strategy:
            self.strategy = strategy
            self._reorder()

    def _begin_step(self, now: float) -> None:
        """Forms batches, checks the load, and accepts requests."""
        if self._batches:
            for sequence in self._batches.take(now, len(self._waiting), len(self._running)):
                self._push(sequence)
        if self._auto is not None:
            self._auto = auto(self._auto, self._signs(), now)
            self._use(self._auto.strategy)
        if self.strategy == "latency" and self._waiting:
            self._sort_out(self._timeline.start(now))

    def _admissible(self) -> int:
        """Number of waiting sequences that may run now, in queue order. Slots and pages may limit it further."""
        if not self._waiting:
            return 0
        if self.strategy == "latency":
            return self._num_accepted
        if self.strategy == "memory":
            return self._fitting()
        running = len(self._running)
        return max(self._rows_wanted(), 1 if not running else 0) - running

    def _rows_wanted(self) -> int:
        """Number of sequences to run at once for the highest throughput in tokens a second."""
        lengths = [len(sequence.tokens) for sequence in self._running or islice(self._waiting, 1)]
        mean, longest = sum(lengths) // len(lengths), max(lengths)

        def seconds(rows: int, tiles: int) -> float:
            return self._seconds(rows, tiles, Work(rows * mean, longest), longest)

        wanting, most = len(self._running) + len(self._waiting), min(self.max_num_seqs, self.ready.max_rows)
        return batch_size(wanting, most, self.ready.table.row_buckets, seconds)

    def _fitting(self) -> int:
        """Number of waiting sequences that fit, given all tokens that they and the running ones are expected to
        generate."""
        first = self._waiting.first
        assert first is not None
        if self._full == (first.number, self._releases):
            return 0
        limits, page_size = self.sequence, self.sequence.page_size
        tokens, size = limits.max_model_len, limits.tile_size
        most = [None if window is None else most_pages(tokens, window, page_size, size) for window in limits.windows]
        growths = [self._growth(sequence) for sequence in self._running]
        room, count = min(len(self._free_slots), self.ready.max_tiles), 0
        for sequence in islice(self._waiting, room):
            growths += [self._growth(sequence)] * sequence.slots
            if (self._running or count) and peak_pages(growths, page_size, most) > self.blocks.capacity:
                if not count:
                    self._full = first.number, self._releases
                break
            count += 1
        return count

    def _growth(self, sequence: Sequence) -> Growth:
        tokens = len(sequence.tokens) + sequence.in_flight
        return Growth(tokens, self.lengths.expected_rest(tokens - sequence.prompt_len, sequence.max_len - sequence.prompt_len))

    def _queue(self, sequence: Sequence) -> None:
        if not self._batches.hold(sequence):
            super()._queue(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if not self._batches.drop(sequence):
            super()._leave(sequence)

    def _signs(self) -> LoadSigns:
        blocks = self.blocks
        preempted, self._preemptions_seen = self.num_preemptions > self._preemptions_seen, self.num_preemptions
        return LoadSigns(
            targets=any(sequence.has_target for sequence in self._live.values()),
            late=self.goodput.late,
            free_pages=1.0 - blocks.owned / blocks.capacity,
            preempted=preempted,
            waiting=len(self._waiting),
        )
