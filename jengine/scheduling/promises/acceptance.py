"""Which waiting requests with targets can be accepted, and when tokens are due."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from itertools import accumulate, islice, takewhile

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.promises.promises import EPSILON, Outlook, Prompt, Stream, best_way
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.step_plan import Work, pairs, rows_work

JUDGED = 32  # new requests judged per step, so that thousands of arrivals do not delay a step
# iterations of judging new requests per step, and of judging the first in the queue; each may exceed it once
EFFORT = 50_000
REJECTED = "rejected"  # the stop_reason of a request whose targets cannot be met


RECENT = 64  # number of recent requests that indicate the current load
REMEMBERED = 512  # outputs
# minimum number of longer outputs for a prediction; with fewer, a request is assumed to reach its limit
FEWEST = 16
QUANTILE = 0.9  # quantile of these lengths, high enough that most requests stay within the prediction


class Acceptance:
    """With the latency strategy, a waiting request runs once it is *accepted*: its own targets and those of
    all earlier accepted requests can be met. A request that can no longer be in time is *late*. It is either
    rejected, or loses its targets and runs when it does not endanger other requests' targets.

    Attributes:
        goodput: counts of requests that met their targets.
        lengths: output lengths of ended requests.
        rejected: sequences that were rejected but not yet reported.
        new: waiting requests that were not judged yet.
    """

    def __init__(self, registry: Registry, predictor: StepPredictor) -> None:
        self._registry, self._limits, self._predictor = registry, registry.limits, predictor
        self._blocks, self._rejects = registry.blocks, registry.options.on_late == "reject"
        self.goodput, self.lengths = Goodput(), OutputLengths()
        self.rejected: list[Sequence] = []
        self.new: list[Sequence] = []
        self._effort = 0  # of judging, in this step
        self._unpromised: object = None  # the request that could not be accepted, and the state at that time

    @property
    def num_accepted(self) -> int:
        """Number of accepted waiting requests. They are first in the queue."""
        return sum(1 for _ in takewhile(lambda sequence: sequence.accepted, self._registry.waiting))

    @property
    def unfinished(self) -> bool:
        """Whether the last step had no time to judge all that it should have."""
        return self._effort >= EFFORT

    # --- judging --------------------------------------------------------------------------------------

    def sort_out(self, start: float) -> None:
        """Accepts waiting requests whose targets can be met, and handles late ones. start: start time of the
        next step.
        """
        registry = self._registry
        self._effort = judged = 0
        for sequence in self.new[:JUDGED]:
            if self._effort >= EFFORT:
                break
            judged += 1
            if sequence.state is State.WAITING and not sequence.accepted:
                self._judge(sequence, start)
        self.new = self.new[judged:]
        self._effort = 0
        while (
            first := next((sequence for sequence in registry.waiting if not sequence.accepted), None)
        ) is not None:
            if self._effort >= EFFORT:
                break
            alone = not registry.running and not self.num_accepted
            if first.has_target and first.first_token is None and not first.late and first.start_by < start:
                self._drop(first)
            elif self._is_unpromised(first) or not self._judge(first, start):
                if not alone:
                    break
                self._drop(first)  # its targets can never be met

    def judge_again(self, waiting: list[Sequence]) -> None:
        """Forgets all judgements. The order of requests has changed. waiting: requests to judge."""
        self.new, self._unpromised = waiting, None

    def _is_unpromised(self, sequence: Sequence) -> bool:
        """Whether it could not be accepted, and no request has ended and no prompt was computed since."""
        registry = self._registry
        state = sequence.number, sequence.late, registry.releases, self.num_accepted, len(registry.running)
        known, self._unpromised = self._unpromised == state, state
        return known

    def _drop(self, sequence: Sequence) -> None:
        if self._rejects and sequence.has_target:
            self.goodput.reject()
            self.rejected.append(sequence)
            self._registry.finish(sequence, "abort", REJECTED)
        elif sequence.late:
            self._accept(sequence, True)
        else:
            self._registry.waiting.remove(sequence)
            sequence.late = True
            self._registry.push(sequence)

    def _judge(self, sequence: Sequence, start: float) -> bool:
        """Accepts a request if its targets and those of all accepted requests can be met."""
        registry = self._registry
        accepted = [*registry.running, *islice(registry.waiting, self.num_accepted), sequence]
        if sum([other.slots for other in accepted]) > min(
            registry.max_num_seqs, self._predictor.ready.max_rows
        ):
            return False
        if self._rejects:  # accepted requests are never preempted
            pages = sum([other.slots * self._limits.most_pages(other.max_len - 1) for other in accepted])
            if pages > self._blocks.capacity:
                return False
        self._accept(sequence, True)
        streams = [s for s in registry.running if s.state is State.DECODING and s.rest > 0]
        outlook = self.outlook(start, streams)
        self._effort += outlook.effort
        if best_way(outlook, self._predictor.tile_buckets(len(accepted))).late:
            self._accept(sequence, False)
        return sequence.accepted

    def _accept(self, sequence: Sequence, accepted: bool) -> None:
        self._registry.waiting.remove(sequence)
        sequence.accepted = accepted
        self._registry.push(sequence)

    # --- promises -------------------------------------------------------------------------------------

    def outlook(self, start: float, streams: List[Sequence]) -> Outlook:
        """Targets of running and accepted requests. Costs assume that all of them decode. streams: decoding
        sequences, with their next tokens.
        """
        waiting, windows, size = self._registry.waiting, self._limits.windows, self._predictor.tile_size
        everyone = [*self._registry.running, *islice(waiting, self.num_accepted)]
        # If late requests are rejected, promises to the others hold until their last tokens.
        lengths = [
            s.max_len if self._rejects else min(len(s.tokens) + s.in_flight + 1, s.max_len) for s in everyone
        ]
        context, longest, _ = rows_work([length - 1 for length in lengths], windows)
        tokens, rank = (
            max(lengths, default=1),
            max([sequence.variant_rank for sequence in everyone], default=0),
        )
        seconds = self._predictor.seconds

        def mixed(tiles: int, attended: int) -> float:
            return seconds(len(everyone), tiles, Work(context, longest, attended), tokens, rank)

        coming = [sequence for sequence in everyone if sequence.state in (State.WAITING, State.PREFILLING)]
        spans = [
            (at, min(at + size, len(s.tokens)))
            for s in coming
            for at in range(_computed(s), len(s.tokens), size)
        ]
        attended = [0, *accumulate([pairs(at, end - at, windows) for at, end in spans])]
        going = [
            Stream(s.due - start, s.tpot, self._length(s, s.rest))
            for s in streams
            if s.tpot < math.inf and not s.late
        ]
        least = seconds(len(streams), 0, Work(), 1)
        streams_in_time = [stream for stream in going if _can_be_met(stream, least)]
        return Outlook(
            mixed(0, 0), mixed, streams_in_time, [self._prompt(s, start) for s in coming], attended
        )

    def _prompt(self, sequence: Sequence, start: float) -> Prompt:
        tiles = -(-(len(sequence.tokens) - _computed(sequence)) // self._predictor.tile_size)
        if sequence.late or sequence.first_token is not None:
            return Prompt(tiles, math.inf)
        return Prompt(
            tiles,
            sequence.arrival + sequence.ttft - start,
            sequence.tpot,
            self._length(sequence, sequence.rest - 1),
        )

    def _length(self, sequence: Sequence, rest: int) -> int | None:
        """Number of tokens, at most `rest`, that it will still generate; None: unknown."""
        params = sequence.request.params
        if params.ignore_eos and not params.stop and not params.stop_token_ids:
            return rest
        if self._rejects:
            return None
        return self.lengths.least_rest(sequence.max_len - sequence.prompt_len - rest, rest)

    # --- what becomes of targets ----------------------------------------------------------------------

    def set_targets(self, sequence: Sequence, now: float, cached: Callable[[], int]) -> None:
        """Sets arrival and targets of a new sequence. cached: finds the prompt tokens that are cached."""
        request, options = sequence.request, self._registry.options
        sequence.arrival, sequence.queued = request.arrival or now, now
        ttft, tpot = request.ttft_ms or options.ttft_ms, request.tpot_ms or options.tpot_ms
        if sequence.searches:  # all of its tokens come at the end
            return
        if tpot is not None:
            sequence.tpot = tpot / 1e3
        if ttft is not None:
            sequence.ttft, sequence.expected_cached = ttft / 1e3, cached()
            left = self._predictor.prompt_seconds(sequence.prompt_len - sequence.expected_cached)
            sequence.start_by = sequence.arrival + sequence.ttft - left

    def note_end(self, sequence: Sequence, now: float) -> None:
        """Records that a sequence has got its last token."""
        if sequence.request.pooling is None:
            self.lengths.note(len(sequence.tokens) - sequence.prompt_len)
        if sequence.has_target:
            self.goodput.ended(sequence, now)


def _computed(sequence: Sequence) -> int:
    """Tokens that need not be computed, as far as is known before the sequence starts."""
    new = sequence.state is State.WAITING and not sequence.num_preemptions
    return sequence.expected_cached if new else sequence.num_computed


def expect(plan: PlanBuilder, end: float) -> None:
    """Records that the sampled sequences get a token in a step predicted to end at `end`."""
    prompts = plan.sampled[len(plan.rows) :]
    for sequence in prompts:
        if sequence.first_token is None:
            sequence.first_token = sequence.due = end
    for sequence in plan.sampled if plan.paced else prompts:
        sequence.due += sequence.tpot


def note_first(sequence: Sequence, now: float) -> None:
    """Records the arrival of its first token."""
    assert sequence.first_token is not None
    sequence.due += now - sequence.first_token
    sequence.first_token = now


def _can_be_met(stream: Stream, least: float) -> bool:
    """Whether a stream can still be in time if every further step takes the minimum time."""
    slack, tpot, length = stream
    return slack >= least if length is None else slack + (length - 1) * tpot >= length * least


class Goodput:
    """Counts of completed requests that had targets.

    Attributes:
        met: the first token came within ttft_ms, and the others tpot_ms apart on average.
        missed: at least one of these targets was missed.
        rejected: rejected before running, since their targets could not be met.
    """

    def __init__(self) -> None:
        self.met = self.missed = self.rejected = 0
        self._recent: deque[bool] = deque(maxlen=RECENT)  # whether each recent request was late

    @property
    def late(self) -> float:
        """Share of recent requests that were late."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def ended(self, sequence: Sequence, now: float) -> None:
        """Records that a request with targets has received its last token."""
        met = in_time(sequence, now)
        self.met, self.missed = self.met + met, self.missed + (not met)
        self._recent.append(not met)

    def reject(self) -> None:
        self.rejected += 1
        self._recent.append(True)


def in_time(sequence: Sequence, now: float) -> bool:
    """Whether a sequence that has just received its last token met its targets."""
    first, others = sequence.first_token, len(sequence.tokens) - sequence.prompt_len - 1
    if first is None or first - sequence.arrival > sequence.ttft + EPSILON:
        return False
    return others < 1 or (now - first) / others <= sequence.tpot + EPSILON


class OutputLengths:
    """Output lengths, in tokens, of recent requests that stopped or reached their limit."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, length: int) -> None:
        if len(self._latest) == REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(length)
        insort(self._sorted, length)

    def expected_rest(self, generated: int, limit: int, quantile: float = QUANTILE) -> int:
        """Predicted number of further tokens of a request that has generated `generated`, at most up to its
        limit. quantile: of the lengths of longer outputs.
        """
        longer = self._longer(generated, quantile)
        return limit - generated if longer is None else min(longer, limit) - generated

    def least_rest(self, generated: int, limit: int) -> int | None:
        """Tokens, at most `limit`, that a request will probably still generate at least; None: unknown."""
        longer = self._longer(generated, 1.0 - QUANTILE)
        return None if longer is None else min(longer - generated, limit)

    def _longer(self, generated: int, quantile: float) -> int | None:
        """This quantile of the lengths above `generated`; None if there are too few."""
        begin = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - begin
        return None if longer < FEWEST else self._sorted[begin + int(quantile * (longer - 1))]
