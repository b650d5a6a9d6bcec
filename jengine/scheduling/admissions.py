"""Which of the waiting requests may be admitted to a step, by batching mode and strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import islice, takewhile

from jengine.pages import most_pages
from jengine.program_table import VARIANTS
from jengine.ready_programs import ReadyPrograms
from jengine.request import FinishReason
from jengine.scheduling.auto_strategy import AutoState, LoadSigns, auto
from jengine.scheduling.batching import Batches
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.goodput import Goodput
from jengine.scheduling.options import SchedulingOptions, StrategyName
from jengine.scheduling.output_lengths import OutputLengths
from jengine.scheduling.page_forecast import Growth, peak_pages
from jengine.scheduling.policy import order_of
from jengine.scheduling.promises import Outlook, Prompt, Stream, best_way
from jengine.scheduling.sequence import Order, Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.sequences import Sequences
from jengine.scheduling.strategies import Decision, batch_size, rows_in_time, too_many
from jengine.scheduling.timeline import Timeline
from jengine.scheduling.work import Work, rows_work

LOOK_AHEAD = 64  # waiting requests that are looked at in each step, to find those that cannot be in time
REJECTED = "rejected"  # the stop_reason of a request whose targets cannot be met


class Admissions(Sequences):
    """Sequences, and how many of those waiting may run.

    Attributes:
        strategy: in use; with strategy="auto", the one that load calls for.
        decisions: how many steps with prompts were composed so, by strategy and reason; `decision` is the last.
        goodput: requests that met their targets.
        rejected: sequences that were rejected and not yet reported.
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
        super().__init__(blocks, sequence, max_num_seqs=max_num_seqs, options=options)
        self.ready = ready  # steps take only these; replaced as more are
        self.max_num_batched_tokens = max_num_batched_tokens
        self.costs, self.clock = costs, clock
        self.goodput, self.lengths = Goodput(), OutputLengths()
        self.decision: Decision | None = None
        self.decisions: Counter[str] = Counter()
        self.rejected: list[Sequence] = []
        self._timeline = Timeline()
        self._batches = Batches(options.batching, max_num_seqs, options.batch_wait_ms / 1e3)
        self._unjudged: list[Sequence] = []  # waiting; whether their targets can be met is not known
        self._auto: AutoState | None = None
        self._preemptions_seen = self._releases = 0
        self._full: tuple[int, int] | None = None  # (the first of those waiting, releases) for which there were no pages
        self.strategy: StrategyName = "throughput"
        self.set_strategy(options.strategy)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._batches)

    @property
    def waiting(self) -> list[Sequence]:
        """See Sequences; those last that wait for a batch to form."""
        return [*self._waiting, *self._batches]

    @property
    def wakes_at(self) -> float:
        """Seconds on the clock: when there may be something to schedule though nothing is collected or added; inf: never."""
        return math.inf if self._waiting or (self._running and self._batches.batching == "static") else self._batches.forms_at

    def set_strategy(self, name: StrategyName) -> None:
        """From the next step on; one of those that `options` allow."""
        self._auto = AutoState(self.strategy) if name == "auto" else None
        self._use(self.strategy if name == "auto" else name)

    # --- before a step ------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        """Forms batches, looks at the load, and sorts out requests that cannot be in time."""
        if self._batches:
            for sequence in self._batches.take(now, len(self._waiting), len(self._running)):
                self._push(sequence)
        if self._auto is not None:
            self._auto = auto(self._auto, self._signs(), now)
            self._use(self._auto.strategy)
        if self.strategy == "latency":
            self._sort_out(self._timeline.start(now))

    def _admissible(self) -> int:
        """How many of those waiting may run now, in their order, beside what slots and pages allow."""
        if not self._waiting:
            return 0
        running = len(self._running)
        if self.strategy == "memory":
            return self._fitting()
        if self._rejects:
            return sum(1 for _ in takewhile(lambda sequence: sequence.accepted, self._waiting))
        return max(self._rows_wanted(), 1 if not running else 0) - running

    def _rows_wanted(self) -> int:
        """How many sequences should run at once, by what steps cost."""
        running, most = len(self._running), min(self.max_num_seqs, self.ready.max_rows)
        wanting = running + len(self._waiting)
        some = [*self._running] or [*islice(self._waiting, 1)]
        lengths = [len(sequence.tokens) for sequence in some]
        mean, longest = sum(lengths) // len(lengths), max(lengths)

        def seconds(rows: int, tiles: int) -> float:
            return self._seconds(rows, tiles, Work(rows * mean, longest), longest)

        if self.strategy == "latency":
            first = self._waiting.first
            tpot = min([sequence.tpot for sequence in self._running if not sequence.late], default=math.inf)
            tpot = tpot if first is None else min(tpot, first.tpot)
            return most if tpot == math.inf else rows_in_time(most, max(min(running, most), 1), tpot, seconds)
        return batch_size(wanting, most, self.ready.table.row_buckets, seconds)

    def _fitting(self) -> int:
        """How many of those waiting have room for all that they and the running ones are expected to generate."""
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
            growths.append(self._growth(sequence))
            if len(growths) > 1 and peak_pages(growths, page_size, most) > self.blocks.capacity:
                if not count:
                    self._full = first.number, self._releases
                break
            count += 1
        return count

    def _growth(self, sequence: Sequence) -> Growth:
        tokens = len(sequence.tokens) + sequence.in_flight
        return Growth(tokens, self.lengths.expected_rest(tokens - sequence.prompt_len, sequence.max_len - sequence.prompt_len))

    # --- targets --------------------------------------------------------------------------------------

    def _sort_out(self, start: float) -> None:
        """Requests that cannot be in time are rejected or put behind the others; those that can be are accepted."""
        if not self._rejects:
            for sequence in self._hopeless(start):
                self._waiting.remove(sequence)
                sequence.late = True
                self._push(sequence)
            return
        unjudged, self._unjudged = self._unjudged, []
        for sequence in unjudged:
            if sequence.state is State.WAITING and not self._judge(sequence, start):
                self._reject(sequence)
        while (first := self._waiting.first) is not None:
            if first.first_token is None and first.start_by < start:
                self._reject(first)
            elif first.accepted or not self._judge(first, start):
                break  # without targets it waits until it is in nobody's way

    def _hopeless(self, start: float) -> List[Sequence]:
        """Waiting requests to give up, so that as many of the others as possible can be in time, at the speed of prompts alone."""
        waiting = [s for s in islice(self._waiting, LOOK_AHEAD) if s.ttft < math.inf and not s.late and s.first_token is None]
        if not waiting:
            return []
        longest, rows = max(len(s.tokens) for s in waiting), len(self._running)
        speed = min([self._seconds(rows, tiles, Work(), longest) / tiles for tiles in self._paces(rows)])
        jobs = [(speed * -(-len(s.tokens) // self.sequence.tile_size), s.arrival + s.ttft - start) for s in waiting]
        return [waiting[i] for i in too_many(jobs)]

    def _judge(self, sequence: Sequence, start: float) -> bool:
        """Accepts a request if its targets and those of all that were accepted before can be met."""
        accepted = [*self._running, *[other for other in self._waiting if other.accepted], sequence]
        pages = sum([self.sequence.most_pages(other.max_len - 1) for other in accepted])
        if len(accepted) > min(self.max_num_seqs, self.ready.max_rows) or pages > self.blocks.capacity:
            return False
        self._accept(sequence, True)
        streams = [s for s in self._running if s.state is State.DECODING and s.rest > 0]
        if best_way(self._outlook(start, streams), self._paces(len(accepted))).late:
            self._accept(sequence, False)
        return sequence.accepted

    def _accept(self, sequence: Sequence, accepted: bool) -> None:
        self._waiting.remove(sequence)
        sequence.accepted = accepted
        self._push(sequence)

    def _reject(self, sequence: Sequence) -> None:
        self.goodput.reject()
        self.rejected.append(sequence)
        self.finish(sequence, "abort", REJECTED)

    def _outlook(self, start: float, streams: List[Sequence]) -> Outlook:
        """Targets of those that run and wait. Costs are those of all of them decoding, where requests are rejected at their full lengths.

        Args:
            streams: those that decode, with their next tokens.
        """
        if self._rejects:
            waiting = [sequence for sequence in self._waiting if sequence.accepted]
        else:
            room = max(min(self.max_num_seqs, self.ready.max_rows, self._rows_wanted()) - len(self._running), 0)
            waiting = [*islice(self._waiting, room)]
        everyone, size = [*self._running, *waiting], self.sequence.tile_size
        # What is promised must hold until the last token; what is merely aimed at may be corrected later.
        lengths = [sequence.max_len if self._rejects else len(sequence.tokens) + sequence.in_flight + 1 for sequence in everyone]
        context, longest = rows_work([length - 1 for length in lengths], self.sequence.windows)
        tokens = max(lengths, default=1)
        rank = max([sequence.variant_rank for sequence in everyone], default=0)

        def mixed(tiles: int) -> float:
            return self._seconds(len(everyone), tiles, Work(context, longest, tiles * size * tokens), tokens, rank)

        coming = [sequence for sequence in everyone if sequence.state is not State.DECODING]
        prompts = [self._prompt(sequence, start) for sequence in coming]
        going = [Stream(s.due - start, s.tpot, self._length(s, s.rest)) for s in streams if s.tpot < math.inf and not s.late]
        least = self._seconds(len(streams), 0, Work(), 1)
        return Outlook(mixed(0), mixed, [stream for stream in going if _can_be_met(stream, least)], prompts)

    def _prompt(self, sequence: Sequence, start: float) -> Prompt:
        tiles = -(-(len(sequence.tokens) - sequence.num_computed) // self.sequence.tile_size)
        if sequence.late or sequence.first_token is not None:
            return Prompt(tiles, math.inf)
        return Prompt(tiles, sequence.arrival + sequence.ttft - start, sequence.tpot, self._length(sequence, sequence.rest - 1))

    def _length(self, sequence: Sequence, rest: int) -> int | None:
        """Tokens that it will still generate, of at most `rest`; None where that is not known."""
        params = sequence.request.params
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return rest
        return None if self._rejects else self.lengths.least_rest(sequence.max_len - sequence.prompt_len - rest, rest)

    def _paces(self, rows: int) -> list[int]:
        """Tiles of a step beside this many rows."""
        most = max((self.max_num_batched_tokens - rows) // self.sequence.tile_size, 1)
        return [tiles for tiles in self.ready.tile_buckets if tiles <= most]

    def _seconds(self, rows: int, tiles: int, work: Work, tokens: int, rank: int = 0) -> float:
        """What a step takes, if its longest sequence has this many tokens."""
        trunk = self.ready.trunk(max(rows, 0 if tiles else 1), tiles, self.blocks.pages_of(tokens))
        return self.costs.seconds(trunk, self.ready.sampler(trunk, VARIANTS[rank]), work)

    # --- arrivals and ends ----------------------------------------------------------------------------

    def _arrive(self, sequence: Sequence) -> None:
        request, options = sequence.request, self.options
        sequence.arrival = request.arrival or self.clock()
        for name, target in (("ttft", request.ttft_ms or options.ttft_ms), ("tpot", request.tpot_ms or options.tpot_ms)):
            if target is not None:
                setattr(sequence, name, target / 1e3)
        if sequence.ttft < math.inf:
            sequence.start_by = sequence.arrival + sequence.ttft - self._prefill_seconds(sequence.prompt_len)
        if self._batches.hold(sequence):
            return
        self._push(sequence)
        if self._rejects and sequence.has_target:
            self._unjudged.append(sequence)

    def _prefill_seconds(self, tokens: int) -> float:
        """What a prompt takes alone."""
        most, size = self._paces(0)[-1], self.sequence.tile_size
        steps, rest = divmod(-(-tokens // size), most)
        return steps * self._seconds(0, most, Work(), tokens) + (self._seconds(0, rest, Work(), tokens) if rest else 0.0)

    def _expect(self, sampled: List[Sequence], rows: int, end: float) -> None:
        """These get a token in a step that is predicted to end then, the first `rows` of them in decode rows."""
        for sequence in islice(sampled, rows, None):
            if sequence.first_token is None:
                sequence.first_token = sequence.due = end
        for sequence in sampled:
            sequence.due += sequence.tpot

    def _note_first(self, sequence: Sequence, now: float) -> None:
        """Its first token has come."""
        assert sequence.first_token is not None
        sequence.due += now - sequence.first_token
        sequence.first_token = now

    def _leave(self, sequence: Sequence) -> None:
        if not self._batches.drop(sequence):
            super()._leave(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """See Sequences."""
        if sequence.state is not State.FINISHED and reason in ("stop", "length"):
            self.lengths.note(len(sequence.tokens) - sequence.prompt_len)
            if sequence.has_target:
                self.goodput.ended(sequence, self.clock())
        super().finish(sequence, reason, stop_reason)

    def _release(self, sequence: Sequence) -> None:
        super()._release(sequence)
        self._releases += 1

    # --- strategies -----------------------------------------------------------------------------------

    def _use(self, strategy: StrategyName) -> None:
        if strategy == self.strategy:
            return
        self.strategy = strategy
        waiting = [*self._waiting]
        for sequence in waiting:
            self._waiting.remove(sequence)
        for sequence in waiting:
            sequence.late = sequence.accepted = False
            self._push(sequence)
        for sequence in self._running:
            sequence.accepted = True
            sequence.order = self._order(sequence)
        self._unjudged = [sequence for sequence in waiting if self._rejects and sequence.has_target and sequence.first_token is None]

    @property
    def _rejects(self) -> bool:
        """Whether only requests that were accepted run."""
        return self.strategy == "latency" and self.options.on_late == "reject"

    def _order(self, sequence: Sequence) -> Order:
        promised = sequence.accepted or not self._rejects
        return order_of(sequence, self.options.policy, self.options.priority_ageing, self.strategy == "latency", promised)

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


def _can_be_met(stream: Stream, least: float) -> bool:
    """Whether a stream can still be in time if every step to come takes as little as one can."""
    slack, tpot, length = stream
    return slack >= least if length is None else slack + (length - 1) * tpot >= length * least
