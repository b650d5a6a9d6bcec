"""Requests with targets: which waiting requests can be accepted, and the promises to running ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import accumulate, islice, takewhile

from jengine.request import FinishReason
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.costs import StepCosts
from jengine.scheduling.goodput import Goodput
from jengine.scheduling.options import SchedulingOptions, StrategyName
from jengine.scheduling.output_lengths import OutputLengths
from jengine.scheduling.policy import order_of
from jengine.scheduling.promises import Outlook, Prompt, Stream, best_way
from jengine.scheduling.sequence import Order, Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits
from jengine.scheduling.sequences import Sequences
from jengine.scheduling.timeline import Timeline
from jengine.scheduling.work import Work, pairs, rows_work
from jengine.table.program_table import VARIANTS
from jengine.table.ready_programs import ReadyPrograms

JUDGED = 32  # new requests judged per step, so that thousands of arrivals do not delay a step
EFFORT = 50_000  # iterations of judging new requests per step, and of judging the first in the queue; each may exceed it once
REJECTED = "rejected"  # the stop_reason of a request whose targets cannot be met


class Targets(Sequences):
    """Sequences and their targets.

    With the latency strategy, a waiting request runs once it is *accepted*: its own targets and those of all
    earlier accepted requests can be met. A request that can no longer be in time is *late*. It is either
    rejected, or loses its targets and runs when it does not endanger other requests' targets.

    Attributes:
        strategy: the strategy in use; with strategy="auto", the one chosen by load.
        goodput: counts of requests that met their targets.
        rejected: sequences that were rejected but not yet reported.
        ready: programs that steps may use; replaced when more become ready.
    """

    strategy: StrategyName = "throughput"

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
        self.ready, self.max_num_batched_tokens = ready, max_num_batched_tokens
        self.costs, self.clock = costs, clock
        self.goodput, self.lengths = Goodput(), OutputLengths()
        self.rejected: list[Sequence] = []
        self._timeline = Timeline()
        self._new: list[Sequence] = []  # not judged yet
        self._releases = 0
        self._effort = 0  # of judging, in this step
        self._unpromised: object = None  # the request that could not be accepted, and the state at that time

    # --- acceptance -----------------------------------------------------------------------------------

    @property
    def _num_accepted(self) -> int:
        """Number of accepted waiting requests. They are first in the queue."""
        return sum(1 for _ in takewhile(lambda sequence: sequence.accepted, self._waiting))

    def _sort_out(self, start: float) -> None:
        """Accepts waiting requests whose targets can be met, and handles late ones.

        Args:
            start: start time of the next step.
        """
        self._effort = judged = 0
        for sequence in self._new[:JUDGED]:
            if self._effort >= EFFORT:
                break
            judged += 1
            if sequence.state is State.WAITING and not sequence.accepted:
                self._judge(sequence, start)
        self._new = self._new[judged:]
        self._effort = 0
        while (first := next((sequence for sequence in self._waiting if not sequence.accepted), None)) is not None:
            if self._effort >= EFFORT:
                break
            alone = not self._running and not self._num_accepted
            if first.has_target and first.first_token is None and not first.late and first.start_by < start:
                self._drop(first)
            elif self._is_unpromised(first) or not self._judge(first, start):
                if not alone:
                    break
                self._drop(first)  # its targets can never be met

    def _is_unpromised(self, sequence: Sequence) -> bool:
        """Whether it could not be accepted, and since then no request has ended and no prompt has been computed."""
        state = sequence.number, sequence.late, self._releases, self._num_accepted, len(self._running)
        known, self._unpromised = self._unpromised == state, state
        return known

    def _drop(self, sequence: Sequence) -> None:
        if self.options.on_late == "reject" and sequence.has_target:
            self.goodput.reject()
            self.rejected.append(sequence)
            self.finish(sequence, "abort", REJECTED)
        elif sequence.late:
            self._accept(sequence, True)
        else:
            self._waiting.remove(sequence)
            sequence.late = True
            self._push(sequence)

    def _judge(self, sequence: Sequence, start: float) -> bool:
        """Accepts a request if its targets and those of all accepted requests can be met."""
        accepted = [*self._running, *islice(self._waiting, self._num_accepted), sequence]
        if sum([other.slots for other in accepted]) > min(self.max_num_seqs, self.ready.max_rows):
            return False
        if self.options.on_late == "reject":  # accepted requests are never preempted
            pages = sum([other.slots * self.sequence.most_pages(other.max_len - 1) for other in accepted])
            if pages > self.blocks.capacity:
                return False
        self._accept(sequence, True)
        streams = [s for s in self._running if s.state is State.DECODING and s.rest > 0]
        outlook = self._outlook(start, streams)
        self._effort += outlook.effort
        if best_way(outlook, self._buckets(len(accepted))).late:
            self._accept(sequence, False)
        return sequence.accepted

    def _accept(self, sequence: Sequence, accepted: bool) -> None:
        self._waiting.remove(sequence)
        sequence.accepted = accepted
        self._push(sequence)

    @property
    def _judging(self) -> bool:
        """Whether the last step had no time to judge all that it should have."""
        return self._effort >= EFFORT

    # --- promises -----------------------------------------------------------------------------------

    def _outlook(self, start: float, streams: List[Sequence]) -> Outlook:
        """Targets of running and accepted requests. Costs assume that all of them decode.

        Args:
            streams: decoding sequences, with their next tokens.
        """
        everyone, size = [*self._running, *islice(self._waiting, self._num_accepted)], self.sequence.tile_size
        # If late requests are rejected, promises to the others hold until their last tokens.
        rejects = self.options.on_late == "reject"
        lengths = [s.max_len if rejects else min(len(s.tokens) + s.in_flight + 1, s.max_len) for s in everyone]
        context, longest = rows_work([length - 1 for length in lengths], self.sequence.windows)
        tokens, rank = max(lengths, default=1), max([sequence.variant_rank for sequence in everyone], default=0)

        def mixed(tiles: int, attended: int) -> float:
            return self._seconds(len(everyone), tiles, Work(context, longest, attended), tokens, rank)

        coming = [sequence for sequence in everyone if sequence.state in (State.WAITING, State.PREFILLING)]
        spans = [(at, min(at + size, len(s.tokens))) for s in coming for at in range(s.num_computed, len(s.tokens), size)]
        attended = [0, *accumulate([pairs(at, end - at, self.sequence.windows) for at, end in spans])]
        going = [Stream(s.due - start, s.tpot, self._length(s, s.rest)) for s in streams if s.tpot < math.inf and not s.late]
        least = self._seconds(len(streams), 0, Work(), 1)
        streams_in_time = [stream for stream in going if _can_be_met(stream, least)]
        return Outlook(mixed(0, 0), mixed, streams_in_time, [self._prompt(s, start) for s in coming], attended)

    def _prompt(self, sequence: Sequence, start: float) -> Prompt:
        tiles = -(-(len(sequence.tokens) - sequence.num_computed) // self.sequence.tile_size)
        if sequence.late or sequence.first_token is not None:
            return Prompt(tiles, math.inf)
        return Prompt(tiles, sequence.arrival + sequence.ttft - start, sequence.tpot, self._length(sequence, sequence.rest - 1))

    def _length(self, sequence: Sequence, rest: int) -> int | None:
        """Number of tokens, at most `rest`, that it will still generate; None: unknown."""
        params = sequence.request.params
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return rest
        if self.options.on_late == "reject":
            return None
        return self.lengths.least_rest(sequence.max_len - sequence.prompt_len - rest, rest)

    def _buckets(self, rows: int) -> list[int]:
        """Tile counts of programs that can run beside this many rows."""
        most = max((self.max_num_batched_tokens - rows) // self.sequence.tile_size, 1)
        return [tiles for tiles in self.ready.tile_buckets if tiles <= most] or [self.ready.tile_buckets[0]]

    def _seconds(self, rows: int, tiles: int, work: Work, tokens: int, rank: int = 0) -> float:
        """Predicted seconds of a step whose longest sequence has `tokens` tokens, or of two if rows and tiles
        are kept apart."""
        if rows and tiles and self.composition.apart:
            alone = work._replace(attended=0)
            return self._seconds(rows, 0, alone, tokens, rank) + self._seconds(0, tiles, Work(attended=work.attended), tokens, rank)
        trunk = self.ready.trunk(max(rows, 0 if tiles else 1), tiles, self.blocks.pages_of(tokens))
        return self.costs.seconds(trunk, self.ready.sampler(trunk, VARIANTS[rank]), work)

    # --- arrivals, tokens and ends ---------------------------------------------------------------------

    def _arrive(self, sequence: Sequence) -> None:
        request, options = sequence.request, self.options
        sequence.arrival = request.arrival or self.clock()
        ttft, tpot = request.ttft_ms or options.ttft_ms, request.tpot_ms or options.tpot_ms
        if sequence.searches:  # all of its tokens come at the end
            ttft = tpot = None
        if tpot is not None:
            sequence.tpot = tpot / 1e3
        if ttft is not None:
            sequence.ttft = ttft / 1e3
            sequence.start_by = sequence.arrival + sequence.ttft - self._prefill_seconds(sequence.prompt_len)
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        """Makes a sequence eligible for admission."""
        self._push(sequence)
        if self.strategy == "latency":
            self._new.append(sequence)

    def _prefill_seconds(self, tokens: int) -> float:
        """Predicted seconds of a prompt alone."""
        most, size = self._buckets(0)[-1], self.sequence.tile_size
        steps, rest = divmod(-(-tokens // size), most)
        return steps * self._seconds(0, most, Work(), tokens) + (self._seconds(0, rest, Work(), tokens) if rest else 0.0)

    def _expect(self, sampled: List[Sequence], rows: int, end: float) -> None:
        """Records that these get a token in a step predicted to end at `end`; the first `rows` of them are decode rows."""
        for sequence in islice(sampled, rows, None):
            if sequence.first_token is None:
                sequence.first_token = sequence.due = end
        for sequence in sampled:
            sequence.due += sequence.tpot

    def _note_first(self, sequence: Sequence, now: float) -> None:
        """Records the arrival of its first token."""
        assert sequence.first_token is not None
        sequence.due += now - sequence.first_token
        sequence.first_token = now

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

    # --- order ----------------------------------------------------------------------------------------

    def _reorder(self) -> None:
        """After a change of strategy, judges waiting sequences again and treats running ones as accepted."""
        waiting = [*self._waiting]
        for sequence in waiting:
            self._waiting.remove(sequence)
        for sequence in waiting:
            sequence.late = sequence.accepted = False
            self._push(sequence)
        for sequence in self._running:
            sequence.accepted = True
            sequence.order = self._order(sequence)
        self._new = waiting if self.strategy == "latency" else []
        self._unpromised = None

    def _order(self, sequence: Sequence) -> Order:
        options, by_slack = self.options, self.strategy == "latency"
        sequence = sequence if sequence.beams is None else sequence.beams.leader
        return order_of(sequence, options.policy, options.priority_ageing, by_slack, promised=sequence.accepted or not by_slack)


def _can_be_met(stream: Stream, least: float) -> bool:
    """Whether a stream can still be in time if every further step takes the minimum time."""
    slack, tpot, length = stream
    return slack >= least if length is None else slack + (length - 1) * tpot >= length * least
