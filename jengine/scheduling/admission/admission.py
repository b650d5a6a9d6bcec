"""How many waiting requests may run, and how many prompt tiles: from the batching mode and the strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import chain, islice
from typing import NamedTuple

from jengine.core.scheduling_options import StrategyName
from jengine.scheduling.admission.strategies import (
    AutoState,
    Decision,
    LoadSigns,
    Situation,
    auto,
    batch_size,
    latency,
    throughput,
)
from jengine.scheduling.costs.predictor import RowsOrTiles, StepPredictor
from jengine.scheduling.promises.acceptance import Acceptance
from jengine.scheduling.prompts.prefix_lookup import PendingTiles
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import Timeline
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import most_pages


class Admission:
    """Applies the strategy.

    Args:
        cohorts: number of cohorts, see Cohorts.

    Attributes:
        strategy: the strategy in use; with strategy="auto", the one chosen by load.
        decisions: number of steps with prompts, by strategy and reason.
        decision: the last of them.
    """

    def __init__(
        self,
        registry: Registry,
        predictor: StepPredictor,
        acceptance: Acceptance,
        timeline: Timeline,
        rows_or_tiles: RowsOrTiles,
        cohorts: int = 1,
    ) -> None:
        self._registry, self._limits, self._predictor = registry, registry.limits, predictor
        self._rows_or_tiles, self._cohorts = rows_or_tiles, cohorts
        self._acceptance, self._timeline = acceptance, timeline
        self.strategy: StrategyName = "throughput"
        self.decision: Decision | None = None
        self.decisions: Counter[str] = Counter()
        self._auto: AutoState | None = None
        self._preemptions_seen = 0
        # (number of the first waiting sequence, releases) when pages were last insufficient
        self._full: tuple[int, int] | None = None
        self.set_strategy(registry.options.strategy)

    @property
    def switches(self) -> bool:
        """Whether the load chooses the strategy."""
        return self._auto is not None

    def wakes_at(self, now: float) -> float:
        registry = self._registry
        if registry.waiting and not registry.running and self._acceptance.unfinished:
            return now
        return (
            math.inf
            if registry.waiting or (registry.running and registry.held.batching == "static")
            else registry.held.forms_at
        )

    def set_strategy(self, name: StrategyName) -> None:
        self._auto = AutoState(self.strategy) if name == "auto" else None
        self._use(self.strategy if name == "auto" else name)

    def queue(self, sequence: Sequence) -> None:
        """Queues a new sequence, or holds it back for a batch."""
        if not self._registry.held.hold(sequence):
            self._registry.push(sequence)
            if self.strategy == "latency":
                self._acceptance.new.append(sequence)

    def begin_step(self, now: float) -> None:
        """Forms batches, checks the load, and accepts requests."""
        registry = self._registry
        if registry.held:
            for sequence in registry.held.take(now, len(registry.waiting), len(registry.running)):
                registry.push(sequence)
        if self._auto is not None:
            self._auto = auto(self._auto, self._signs(), now)
            self._use(self._auto.strategy)
        if self.strategy == "latency" and registry.waiting:
            self._acceptance.sort_out(self._timeline.start(now))

    def count(self) -> int:
        """Number of waiting sequences that may run now, in queue order. Slots and pages may limit it."""
        if not self._registry.waiting:
            return 0
        if self.strategy == "latency":
            return self._acceptance.num_accepted
        if self.strategy == "memory":
            return self._fitting()
        running = len(self._registry.running)
        return max(self._rows_wanted(), 1 if not running else 0) - running

    def tiles(
        self, now: float, rows: list[Sequence], work: Work, pending: PendingTiles, tokens: int, admitting: int
    ) -> int:
        """Number of pending tiles to run beside the decode rows, as the strategy decides.

        Args:
            work: work of the rows.
            tokens: length of the longest sequence.
            admitting: number of waiting sequences that may run.
        """
        registry, predictor = self._registry, self._predictor
        rank = max(
            [s.variant_rank for s in chain(registry.running, islice(registry.waiting, max(admitting, 0)))]
        )

        def seconds(rows: int, tiles: int) -> float:
            whole = work._replace(attended=pending.attended(tiles))
            ends = [end for end in pending.ends(tiles) if self._rows_or_tiles.fits(end.length)]
            return self._rows_or_tiles.best(rows, tiles, whole, tokens, ends, rank)[1]

        outlook = (
            self._acceptance.outlook(self._timeline.start(now), rows) if self.strategy == "latency" else None
        )
        buckets = [tiles for tiles in predictor.ready.tile_buckets if tiles >= pending.least]
        situation = Situation(
            len(rows),
            pending.count,
            predictor.tile_size,
            buckets,
            seconds,
            outlook,
            idle=self._idle(len(rows)),
            lost=self.decision.lost if self.decision else 0.0,
            padded=lambda rows, tiles: predictor.seconds(rows, tiles, work, tokens, rank),
        )
        self.decision = throughput(situation) if outlook is None else latency(situation)
        self.decisions[f"{self.strategy}: {self.decision.reason}"] += 1
        return self.decision.tiles

    def _idle(self, rows: int) -> int:
        """Slots without a row, if more requests wait than there are slots and there is one cohort."""
        registry = self._registry
        if self._cohorts > 1 or len(registry.waiting) <= len(registry.free_slots):
            return 0
        return min(registry.max_num_seqs, self._predictor.ready.max_rows) - rows

    def _use(self, strategy: StrategyName) -> None:
        """After a change of strategy, judges waiting sequences again and treats running ones as accepted."""
        if strategy == self.strategy:
            return
        self.strategy, registry = strategy, self._registry
        registry.by_slack = strategy == "latency"
        waiting = [*registry.waiting]
        for sequence in waiting:
            registry.waiting.remove(sequence)
        for sequence in waiting:
            sequence.late = sequence.accepted = False
            registry.push(sequence)
        for sequence in registry.running:
            sequence.accepted = True
            sequence.order = registry.order(sequence)
        self._acceptance.judge_again(waiting if strategy == "latency" else [])

    def _rows_wanted(self) -> int:
        """Number of sequences to run at once for most tokens a second. A step has rows of one cohort."""
        registry, ready = self._registry, self._predictor.ready
        lengths = [len(sequence.tokens) for sequence in registry.running or islice(registry.waiting, 1)]
        mean, longest = sum(lengths) // len(lengths), max(lengths)

        def seconds(rows: int, tiles: int) -> float:
            return self._predictor.seconds(rows, tiles, Work(rows * mean, longest), longest)

        wanting, limit = (
            len(registry.running) + len(registry.waiting),
            min(registry.max_num_seqs, ready.max_rows),
        )
        parts = -(-wanting // self._cohorts), -(-limit // self._cohorts)
        rows = batch_size(*parts, ready.table.row_buckets, seconds)
        return min(rows * self._cohorts, limit)

    def _fitting(self) -> int:
        """Number of waiting sequences that fit with all tokens expected, also of running ones."""
        registry, limits = self._registry, self._limits
        first = registry.waiting.first
        assert first is not None
        if self._full == (first.number, registry.releases):
            return 0
        tokens, size, page_size = limits.max_model_len, limits.at_once, limits.page_size
        window_pages = [
            None if window is None else most_pages(tokens, window, page_size, size)
            for window in limits.windows
        ]
        growths = [self._growth(sequence) for sequence in registry.running]
        room, count = min(len(registry.free_slots), self._predictor.ready.max_tiles), 0
        for sequence in islice(registry.waiting, room):
            growths += [self._growth(sequence)] * sequence.slots
            if (registry.running or count) and peak_pages(
                growths, page_size, window_pages
            ) > registry.blocks.capacity:
                if not count:
                    self._full = first.number, registry.releases
                break
            count += 1
        return count

    def _growth(self, sequence: Sequence) -> Growth:
        tokens = len(sequence.tokens) + sequence.in_flight
        lengths = self._acceptance.lengths
        return Growth(
            tokens,
            lengths.expected_rest(tokens - sequence.prompt_len, sequence.max_len - sequence.prompt_len),
        )

    def _signs(self) -> LoadSigns:
        registry, blocks = self._registry, self._registry.blocks
        preempted, self._preemptions_seen = (
            registry.num_preemptions > self._preemptions_seen,
            registry.num_preemptions,
        )
        return LoadSigns(
            targets=any(sequence.has_target for sequence in registry.by_id.values()),
            late=self._acceptance.goodput.late,
            free_pages=1.0 - blocks.owned / blocks.capacity,
            preempted=preempted,
            waiting=len(registry.waiting),
        )


class Growth(NamedTuple):
    """A sequence's current tokens, and the number expected until it ends and frees its pages."""

    tokens: int
    rest: int


def peak_pages(sequences: Iterable[Growth], page_size: int, limits: List[int | None] = (None,)) -> int:
    """Upper bound on the pages held at once, if every sequence gets a token per step and ends at its expected
    length.

    The maximum occurs just before a sequence ends. At that moment every longer sequence has grown by the
    tokens that the ending one had left. So only these moments are checked (as in the Past-Future scheduler,
    Gong et al., 2025).

    Args:
        limits: for each cache group, the maximum number of pages that a sequence holds; None: as many as its
            tokens need.
    """
    tokens = peak = 0
    for count, growth in enumerate(sorted(sequences, key=lambda growth: -growth.rest), 1):
        tokens += growth.tokens
        # the last page of each sequence may be nearly empty
        pages = -(-(tokens + count * (growth.rest + page_size - 1)) // page_size)
        peak = max(peak, sum([pages if limit is None else min(pages, count * limit) for limit in limits]))
    return peak
