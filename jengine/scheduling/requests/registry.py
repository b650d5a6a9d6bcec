"""All unfinished sequences: those that wait, in order, and those that run, with their slots and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as List

from jengine.base.errors import InvalidArgument
from jengine.core.request import FinishReason, Request
from jengine.core.scheduling_options import SchedulingOptions
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.batching import Batches, Composition
from jengine.scheduling.requests.beams import Beams
from jengine.scheduling.requests.images import Images
from jengine.scheduling.requests.loras import Lora, LoraPlaces
from jengine.scheduling.requests.policy import NO_DEADLINE, FairQueue, Waiting, WaitingQueue
from jengine.scheduling.requests.sequence import Order, Sequence, State
from jengine.scheduling.requests.sequence_limits import SequenceLimits


class PreemptionNeeded(Exception):
    """A sequence would have to be preempted, and `Registry.may_preempt` is False."""


class Registry:
    """A sequence waits or runs, from `add` to `finish`.

    Slots and pages are freed as soon as a sequence finishes or is preempted, even if a dispatched step still
    uses them. This is safe because steps cannot overtake each other: the cache and the slots are donated from
    step to step, so the writes of the next owner come after the last use by the previous one. For the same
    reason, a page may be shared as soon as the step that fills it is planned.

    Args:
        limits: of one sequence.
        composition: what a step may combine.
        max_num_seqs: maximum number of running sequences. They own slots 1 to max_num_seqs; slot 0 is the
            null slot.
        places: of adapters on the devices.
        images: embeddings of images.

    Attributes:
        waiting: sequences that may be admitted, in admission order.
        held: sequences held back for a batch.
        fair: `waiting` if clients share fairly, otherwise None.
        running: in order of admission.
        ended: finished sequences that the caller has not yet taken from here.
        releases: how often a sequence gave back its slot and pages.
        by_slack: whether the order depends on targets.
        may_preempt: whether `preempt` preempts; otherwise it raises PreemptionNeeded.
        forgets: called with each sequence that gives back its slot and its pages.
        loras: loaded adapters.
        incoming: numbers of waiting sequences for which pages are being loaded from a store.
    """

    def __init__(
        self,
        blocks: BlockManager,
        limits: SequenceLimits,
        composition: Composition,
        max_num_seqs: int,
        *,
        options: SchedulingOptions,
        places: int = 0,
        images: Images | None = None,
    ) -> None:
        self.blocks, self.max_num_seqs, self.options = blocks, max_num_seqs, options
        self.limits, self.composition = limits, composition
        self.num_preemptions = self.releases = 0
        self.ended: list[Sequence] = []
        self.incoming = set[int]()
        self.loras, self.images = LoraPlaces(places), images or Images(0, 0)
        self.by_slack, self.may_preempt = False, True
        self.forgets: List[Callable[[Sequence], object]] = ()
        self.fair = FairQueue() if options.policy == "fair" else None
        self.waiting: Waiting = WaitingQueue() if self.fair is None else self.fair
        self.held = Batches(options.batching, max_num_seqs, options.batch_wait_ms / 1e3)
        self.running: dict[Sequence, None] = {}
        self.by_id: dict[str, Sequence] = {}  # waiting and running requests
        self.by_number: dict[int, Sequence] = {}  # waiting and running sequences
        self.free_slots = list(range(max_num_seqs, 0, -1))
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.held)

    @property
    def fetching(self) -> bool:
        """Whether any sequence is waiting for pages from the host."""
        return self.blocks.tier is not None and self.blocks.tier.fetching

    def snapshot(self) -> tuple[list[Sequence], list[Sequence]]:
        """(running, waiting), each in its order; sequences held back for a batch come last. Thread-safe."""
        while True:
            try:
                return [*self.running], [*self.waiting, *self.held]
            except (RuntimeError, KeyError, ValueError):  # changed by the other thread
                continue

    # --- arrivals and order ---------------------------------------------------------------------------

    def check_id(self, request_id: str) -> None:
        """Raises InvalidArgument if an unfinished request has this id."""
        if request_id in self.by_id:
            raise InvalidArgument("request_id", request_id, "a request with this id is not finished yet")

    def add(
        self,
        request: Request,
        *,
        seed: int,
        max_len: int,
        eos_token_ids: tuple[int, ...],
        family: int | None,
        lora: Lora | None,
    ) -> Sequence:
        """Adds a sequence, which waits but is not queued yet. Arguments as in Scheduler.add.

        Raises:
            InvalidArgument: see `check_id`. Nothing is added in this case.
        """
        self.check_id(request.request_id)
        params, number = request.params, self._arrivals
        first = None if family is None else self.by_number.get(family)
        if first is not None and first.request.params.stop_token_ids == params.stop_token_ids:
            # a prompt's samples share what may be as large as the vocabulary
            stops, suppressed = first.stop_token_ids, first.suppressed_token_ids
        else:
            suppressed = tuple(dict.fromkeys((*params.stop_token_ids, *eos_token_ids)))
            stops = frozenset(params.stop_token_ids if params.ignore_eos else suppressed)
        sequence = Sequence(
            request=request,
            number=number,
            family=number if family is None else family,
            seed=seed,
            max_len=max_len,
            eos_token_ids=eos_token_ids,
            stop_token_ids=stops,
            suppressed_token_ids=suppressed,
            tokens=list(request.prompt_token_ids),
            lora=lora,
        )
        self.loras.came(lora)
        self.images.came(sequence)
        self._arrivals += 1
        self.by_id[request.request_id] = self.by_number[number] = sequence
        return sequence

    def add_beam(self, leader: Sequence, beams: Beams[Sequence]) -> Sequence:
        """Adds an empty sequence to hold one more of the leader's beams."""
        beam = Sequence(
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
            lora=leader.lora,
            prefix=leader.prefix,
        )
        beam.order = leader.order
        self._arrivals += 1
        self.by_number[beam.number] = beam
        self.blocks.empty(beam.number, leader.salt)
        return beam

    @property
    def next(self) -> Sequence | None:
        """The first waiting sequence that may start."""
        return next(self.startable(), None)

    def startable(self) -> Iterator[Sequence]:
        """Waiting sequences that may start, in order: their pages have come, their adapters have places or
        can get them, and their images are encoded. If the order depends on targets, they are accepted.
        """
        for sequence in self.waiting:
            if self.by_slack and not sequence.accepted:
                return  # accepted ones come first
            if (
                sequence.number not in self.incoming
                and self.images.may_start(sequence)
                and self.loras.may_start(sequence.lora, len(self.free_slots))
            ):
                yield sequence

    def order(self, sequence: Sequence) -> Order:
        """A sequence's place in the order; smaller comes first.

        If waiting time counts, one level of priority is worth priority_ageing seconds of waiting. The request
        with the lower sum of priority * priority_ageing and arrival comes first. (If the order depends on
        targets, the time by which it must start replaces arrival, and sequences whose targets were accepted
        come before all others.) The sum is constant while requests wait, so each request is overtaken only by
        requests that arrive within a bounded time after it. A late request counts as one level lower.
        """
        options, sequence, by_slack = self.options, sequence.leader, self.by_slack
        ageing, by_priority = options.priority_ageing, options.policy == "priority"
        unpromised = by_slack and not sequence.accepted
        level = (sequence.request.priority if by_priority else 0) + sequence.late
        when = min(sequence.start_by, sequence.arrival + NO_DEADLINE) if by_slack else sequence.arrival
        if ageing and (by_slack or by_priority):
            return unpromised, 0, when + level * ageing, sequence.number
        return unpromised, level, when if by_slack else 0.0, sequence.number

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence at its place in the order."""
        sequence.order = self.order(sequence)
        self.waiting.push(sequence)

    # --- running sequences ----------------------------------------------------------------------------

    def start(self, members: list[Sequence]) -> None:
        """Starts to run a waiting sequence, the first of `members`. The others are its empty beams."""
        self.waiting.admit(members[0])
        self.loras.start(members[0].lora)
        for member in members:
            self.running[member] = None
            member.slot = self.free_slots.pop()

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence, which then waits and recomputes the tokens that are
        no longer cached.

        Beams are preempted together. Their search starts again after the prompt.
        """
        if not self.may_preempt:
            raise PreemptionNeeded
        sequence = sequence.leader
        self._release(sequence)
        if sequence.searches:
            sequence.tokens, sequence.beams = list(sequence.request.prompt_token_ids), None
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.state is State.FINISHED:
            return
        if sequence.state is not State.WAITING:
            self._release(sequence)
        elif not self.held.drop(sequence):
            self.waiting.remove(sequence)
        sequence.state, sequence.in_flight, sequence.tentative = State.FINISHED, 0, 0
        self.ended.append(sequence)
        self.loras.ended(sequence.lora)
        self.images.ended(sequence)
        self.incoming.discard(sequence.number)
        del self.by_id[sequence.request_id], self.by_number[sequence.number]

    def _release(self, sequence: Sequence) -> None:
        self.loras.stop(sequence.lora)
        self.images.forget(sequence)
        for member in [sequence] if sequence.beams is None else sequence.beams.members:
            del self.running[member]
            for forget in self.forgets:
                forget(member)
            # Known tokens that are planned are certain: only later ones may not come.
            self.blocks.commit(
                member.number, member.keys, min(member.num_computed, self.composition.prefilled(member))
            )
            self.blocks.release(member.number)
            self.free_slots.append(member.slot)
            member.slot = 0
            if member is not sequence:
                member.state = State.FINISHED
                del self.by_number[member.number]
        self.releases += 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page, slot and request is in exactly one place."""
        self.blocks.check_integrity()
        self.loras.check_integrity()
        self.images.check_integrity()
        running, waiting = list(self.running), [*self.waiting, *self.held]
        requests = {sequence.leader for sequence in running}
        assert self.blocks.numbers == {sequence.number for sequence in running}, "a block table is lost"
        slots = sorted([*self.free_slots, *(sequence.slot for sequence in running)])
        assert slots == list(range(1, self.max_num_seqs + 1)), f"a slot is shared or lost: {slots}"
        assert all(s.slot == 0 and s.state is State.WAITING for s in waiting), (
            "a waiting sequence owns something"
        )
        assert all(
            s.state in (State.FETCHING, State.PREFILLING, State.DECODING, State.HELD) for s in running
        ), "a running sequence has nothing to do"
        assert all((s.state is State.FETCHING) == self.blocks.fetches(s.number) for s in running), (
            "a sequence waits for pages in vain"
        )
        assert {*requests, *waiting} == {*self.by_id.values()}, "a request is lost"
        assert {*running, *waiting} == {*self.by_number.values()}, "a sequence is lost"
        assert len(requests) + len(waiting) == len(self.by_id), "a request is in two places"
