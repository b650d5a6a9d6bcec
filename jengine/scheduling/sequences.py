"""Unfinished sequences, and the slots and pages of those that run."""

from __future__ import annotations

from jengine.errors import InvalidArgument
from jengine.request import FinishReason, Request
from jengine.scheduling.beams import Beams
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.composition import Composition
from jengine.scheduling.fair_shares import FairQueue
from jengine.scheduling.options import SchedulingOptions
from jengine.scheduling.policy import Waiting, WaitingQueue, order_of
from jengine.scheduling.sequence import Order, Sequence, State
from jengine.scheduling.sequence_limits import SequenceLimits


class Sequences:
    """A sequence waits or runs, from `add` to `finish`.

    Slots and pages are freed as soon as a sequence finishes or is preempted, even if a dispatched step still
    uses them. This is safe because steps cannot overtake each other: the cache and the slots are donated from
    step to step, so the writes of the next owner come after the last use by the previous one. For the same
    reason, a page may be shared as soon as the step that fills it is planned.

    Args:
        sequence: limits of one sequence.
        max_num_seqs: maximum number of running sequences. They own slots 1 to max_num_seqs; slot 0 is the null slot.

    Attributes:
        ended: finished sequences that the caller has not yet taken from here.
    """

    composition = Composition()

    def __init__(self, blocks: BlockManager, sequence: SequenceLimits, *, max_num_seqs: int, options: SchedulingOptions) -> None:
        self.blocks, self.sequence, self.max_num_seqs, self.options = blocks, sequence, max_num_seqs, options
        self.num_preemptions = 0
        self.ended: list[Sequence] = []
        self._arrivals = 0
        self._live: dict[str, Sequence] = {}  # waiting and running, by request id
        self._by_number: dict[int, Sequence] = {}  # the same, by number
        self._fair = FairQueue() if options.policy == "fair" else None
        self._waiting: Waiting = WaitingQueue() if self._fair is None else self._fair
        self._running: dict[Sequence, None] = {}
        self._sharing: dict[Sequence, None] = {}  # running; the page that they write next may be shared
        self._repeating: dict[Sequence, None] = {}  # running; rows recompute tokens generated before a preemption
        self._searching: dict[Sequence, Beams[Sequence]] = {}  # running; leaders of beams
        self._forked: dict[Sequence, None] = {}  # running; the device lacks part of their block tables
        self._arrived: dict[Sequence, None] = {}  # running; their pages have arrived, but their slots are not set yet
        self._free_slots = list(range(max_num_seqs, 0, -1))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences in admission order."""
        return [*self._waiting]

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._live)

    def check_id(self, request_id: str) -> None:
        """Raises InvalidArgument if an unfinished request has this id."""
        if request_id in self._live:
            raise InvalidArgument("request_id", request_id, "a request with this id is not finished yet")

    def add(self, request: Request, *, seed: int, eos_token_ids: tuple[int, ...], family: int | None = None) -> Sequence:
        """Queues a request that has passed SequenceLimits.validate.

        As in vLLM, max_tokens is clipped to what fits into max_model_len.

        Args:
            family: number of the prompt's first sample; None for the first one.

        Raises:
            InvalidArgument: see `check_id`. Nothing is queued in this case.
        """
        self.check_id(request.request_id)
        params = request.params
        suppressed = tuple(dict.fromkeys((*params.stop_token_ids, *eos_token_ids)))
        sequence = Sequence(
            request=request,
            number=self._arrivals,
            family=self._arrivals if family is None else family,
            seed=seed,
            max_len=self.sequence.max_len(request),
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids if params.ignore_eos else suppressed),
            suppressed_token_ids=suppressed,
            tokens=list(request.prompt_token_ids),
        )
        self._arrivals += 1
        self._live[request.request_id] = self._by_number[sequence.number] = sequence
        self._arrive(sequence)
        return sequence

    def _arrive(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Removes a waiting sequence from the queue."""
        self._waiting.remove(sequence)

    def _push(self, sequence: Sequence) -> None:
        sequence.order = self._order(sequence)
        self._waiting.push(sequence)

    def _order(self, sequence: Sequence) -> Order:
        sequence = sequence if sequence.beams is None else sequence.beams.leader
        return order_of(sequence, self.options.policy, self.options.priority_ageing)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence. If it has already ended, changes only the reason: its last token may also complete a
        stop string."""
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.WAITING:
            self._leave(sequence)
        else:
            self._release(sequence)
        sequence.state, sequence.in_flight = State.FINISHED, 0
        self.ended.append(sequence)
        del self._live[sequence.request_id], self._by_number[sequence.number]

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished request with this id."""
        return self._live.get(request_id)

    def running(self, number: int) -> Sequence | None:
        """The unfinished sequence with this number."""
        return self._by_number.get(number)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a request. Returns None if no unfinished request has this id."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def snapshot(self) -> tuple[list[Sequence], list[Sequence]]:
        """(running, waiting), each in its order. Thread-safe."""
        while True:
            try:
                return [*self._running], [*self._waiting]
            except (RuntimeError, KeyError):  # changed by the other thread
                continue

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and request is in exactly one place."""
        self.blocks.check_integrity()
        running, waiting = list(self._running), self.waiting
        requests = {sequence if sequence.beams is None else sequence.beams.leader for sequence in running}
        assert self.blocks.numbers == {sequence.number for sequence in running}, "a block table is lost"
        slots = sorted([*self._free_slots, *(sequence.slot for sequence in running)])
        assert slots == list(range(1, self.max_num_seqs + 1)), f"a slot is shared or lost: {slots}"
        assert all(s.slot == 0 and s.state is State.WAITING for s in waiting), "a waiting sequence owns something"
        assert all(s.state in (State.FETCHING, State.PREFILLING, State.DECODING, State.HELD) for s in running), (
            "a running sequence has nothing to do"
        )
        assert all((s.state is State.FETCHING) == self.blocks.fetches(s.number) for s in running), "a sequence waits for pages in vain"
        assert {*self._arrived} <= {*running}, "a sequence that does not run has got its pages"
        assert {*requests, *waiting} == {*self._live.values()}, "a request is lost"
        assert {*running, *waiting} == {*self._by_number.values()}, "a sequence is lost"
        assert len(requests) + len(waiting) == len(self._live), "a request is in two places"
        members = [member for beams in self._searching.values() for member in beams.members]
        assert {*members} == {s for s in running if s.searches} and len({*members}) == len(members), "a beam is lost"
        assert {*self._forked} <= {*members}, "a sequence that is no beam was forked"
        assert {*self._sharing} <= {*running}, "a sequence that does not run shares a page"
        assert {*self._repeating} <= {*running}, "a sequence that does not run repeats tokens"

    def _take_slots(self, sequence: Sequence) -> list[Sequence]:
        """Starts to run a waiting sequence. Returns it or, for a beam search, all sequences that will hold its beams."""
        self._waiting.admit(sequence)
        members = [sequence]
        if sequence.request.beams is not None:
            beams = self._searching[sequence] = sequence.beams = Beams(
                sequence.request.beams, sequence, sequence.prompt_len, sequence.eos_token_ids
            )
            for _ in range(sequence.slots - 1):
                beams.members.append(self._member(sequence, beams))
            members = beams.members
        for member in members:
            self._running[member] = None
            member.slot = self._free_slots.pop()
        return members

    def _member(self, leader: Sequence, beams: Beams[Sequence]) -> Sequence:
        """Adds an empty sequence to hold one more of the leader's beams."""
        member = Sequence(
            request=leader.request,
            number=self._arrivals,
            family=leader.number,
            seed=leader.seed,
            max_len=leader.max_len,
            eos_token_ids=leader.eos_token_ids,
            stop_token_ids=leader.stop_token_ids,
            suppressed_token_ids=leader.suppressed_token_ids,
            tokens=list(leader.tokens),
            state=State.HELD,
            accepted=leader.accepted,
            beams=beams,
        )
        member.order = leader.order
        self._arrivals += 1
        self._by_number[member.number] = member
        self.blocks.empty(member.number, leader.request.cache_salt)
        return member

    def _preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence, which then waits and recomputes the tokens that are no
        longer cached.

        Beams are preempted together. Their search starts again after the prompt.
        """
        if sequence.beams is not None:
            sequence = sequence.beams.leader
        self._release(sequence)
        if sequence.searches:
            sequence.tokens, sequence.beams = list(sequence.request.prompt_token_ids), None
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        beams = self._searching.pop(sequence, None)
        for one in [sequence] if beams is None else beams.members:
            del self._running[one]
            for some in (self._sharing, self._repeating, self._forked, self._arrived):
                some.pop(one, None)
            self.blocks.commit(one.number, one.tokens, min(one.num_computed, self.composition.prefilled(one)))
            self.blocks.release(one.number)
            self._free_slots.append(one.slot)
            one.slot = 0
            if one is not sequence:
                one.state = State.FINISHED
                del self._by_number[one.number]
