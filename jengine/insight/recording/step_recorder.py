"""Records each step of an engine's loop: its contents, its predicted and its actual duration. Always on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from jengine.base.compiles import compile_count, compile_seconds
from jengine.insight.recording.machine import MachineClock, garbage_pauses, memory
from jengine.insight.recording.records import (
    EngineFacts,
    Machine,
    Memory,
    RequestRecord,
    StepRecord,
    StepTotals,
)
from jengine.insight.recording.trace import Trace
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import EncoderKey

STEPS, REQUESTS = 8192, 4096  # numbers of records kept
# numbers of samples of memory and processors kept, and seconds between them
SAMPLES, SAMPLE_SECONDS = 1024, 2.0


class StepRecorder:
    """The most recent steps and requests, in ring buffers.

    The loop reports when it begins with a step, has dispatched it, has read it, has delivered its updates,
    and pauses. A record is kept once its step has been read. The times after that are added when the loop
    begins with the next step.

    Args:
        overlap: as in Engine.
        programs: returns how many programs are ready, and how many there are.
        steps, requests: numbers of records to keep.

    Attributes:
        thread: threading.get_ident() of the last thread that stepped the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        overlap: bool,
        programs: Callable[[], tuple[int, int]] = lambda: (0, 0),
        steps: int = STEPS,
        requests: int = REQUESTS,
    ) -> None:
        self._scheduler, self._overlap, self._tile_size = scheduler, overlap, scheduler.table.tile_size
        self.steps: deque[StepRecord] = deque(maxlen=steps)
        self.requests: deque[RequestRecord] = deque(maxlen=requests)
        self.memories: deque[Memory] = deque(maxlen=SAMPLES)
        self.machines: deque[Machine] = deque(maxlen=SAMPLES)
        self._machine, self._programs = MachineClock(), programs
        self._native = 0  # the kernel's id of the thread
        self._pauses = garbage_pauses()
        self._number = 0
        self._begun = self._cpu = 0.0  # of this iteration
        self._reading = 0.0  # seconds of this iteration in which earlier steps were read and collected
        # the last step that was read, until the loop begins with the next one
        self._last: StepRecord | None = None
        self._passed_on = self._next_sample = 0.0
        self._paused = False
        self._decision: object = None  # of the last step
        self._patches, self._encoder = 0, 0.0  # of encoders' programs, and their seconds, for the next step
        self._totals, self._totalled = StepTotals(), 0  # totals of the steps with smaller numbers
        self._lock = threading.Lock()  # protects these two
        self.thread = 0

    # --- called by the loop-----------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """The loop begins with the next step."""
        if self._last is not None and not self._paused:
            self._last.away = now - self._passed_on
        self._last = None
        if now >= self._next_sample:
            self._native = threading.get_native_id()
            self.memories.append(memory(now))
            self.machines.append(self._sample(now))
            self._next_sample = now + SAMPLE_SECONDS
        self._paused = False
        self._begun = now
        self._reading = 0.0
        self._cpu = time.thread_time()
        self.thread = threading.get_ident()

    def planned(self) -> None:
        """The scheduler has made its plan."""
        self._cpu = time.thread_time() - self._cpu

    def encodes(self, key: EncoderKey) -> None:
        """This program runs before the next step."""
        self._patches += key.patches
        self._encoder += self._scheduler.predictor.costs.added_seconds(key)

    def dispatched(
        self, plan: StepPlan, planned: float, started: float, now: float, mask: float = 0.0
    ) -> StepRecord:
        """A step has been planned, and its programs have been called.

        Args:
            planned: time at which the plan was made.
            started: time at which its trunk was called.
            now: time at which its sampler had been called.
            mask: seconds to compute its token masks. Before that, the trunk was called and the previous step
                read.
        """
        scheduler, trunk, spans, size = self._scheduler, plan.trunk, plan.spans, self._tile_size
        chunks, tokens, tiles, prompt_rows = list[tuple[int, int, int]](), 0, 0, 0
        for span in spans[: -plan.prompts - 1 : -1]:
            chunks.append((span.seq, span.start, span.length))
            if span.tokens is None:
                prompt_rows += span.length
            else:
                tokens += span.length
                tiles += -(-span.length // size)
        decision, blocks, begun = scheduler.admission.decision, scheduler.blocks, self._begun
        reason = "" if decision is None or decision is self._decision else decision.reason
        self._decision = decision
        cached, owned, tier = blocks.cached, blocks.owned, blocks.tier
        host = scheduler.predictor.costs.host_seconds(len(spans), trunk.tiles)
        number, patches, encoder = self._number, self._patches, self._encoder
        self._number, self._patches, self._encoder = number + 1, 0, 0.0
        return StepRecord(
            number,
            trunk,
            plan.sampler,
            plan.rows,
            tiles,
            tokens,
            plan.work,
            tuple(chunks),
            begun,
            planned - begun,
            started - planned,
            now - started - mask - self._reading,
            mask,
            now,
            plan.seconds,
            host.plan,
            host.collect,
            scheduler.predictor.costs.drift,
            scheduler.registry.num_running,
            scheduler.registry.num_waiting,
            blocks.capacity - owned - cached,
            cached,
            owned,
            scheduler.registry.num_preemptions,
            scheduler.prefixes.queries,
            scheduler.prefixes.hits,
            blocks.evictions,
            scheduler.prefixes.resumptions,
            0 if tier is None else tier.spilled,
            0 if tier is None else tier.fetched,
            compile_count(),
            compile_seconds(),
            self._pauses.seconds,
            scheduler.admission.strategy,
            reason,
            plan.steps,
            self._cpu,
            prompt_rows=prompt_rows,
            drafts=plan.guesses,
            patches=patches,
            encoder=encoder,
        )

    def read(
        self,
        record: StepRecord,
        begun: float,
        now: float,
        collected: float,
        *,
        waited: bool,
        device: float,
        accepted: int = 0,
    ) -> None:
        """A step's tokens were requested, arrived, and were given to their sequences; see StepRecord."""
        record.wait, record.waited, record.ended = now - begun, waited, now
        record.collect, record.device, record.accepted = collected - now, device, accepted
        self._reading += collected - begun
        if len(self.steps) == self.steps.maxlen and self.steps[0].number >= self._totalled:
            self.totals()  # before the ring loses it
        self._last, self._passed_on = record, collected
        self.steps.append(record)

    def turned(self, now: float) -> None:
        """The iteration has ended, and its updates have been delivered."""
        self._passed_on = now

    def passed_on(self, now: float) -> None:
        """The iteration's updates have been delivered: text was made, and callers have it."""
        if self._last is not None:
            self._last.text, self._passed_on = now - self._passed_on, now
            if self._paused:
                self._last = None

    def pause(self) -> None:
        """Nothing is left to do. The loop's time until its next iteration does not belong to a step."""
        self._paused = True

    def ended(self, sequence: Sequence, now: float) -> None:
        """A request has ended."""
        self.requests.append(request_record(sequence, now))

    # --- thread-safe -----------------------------------------------------------------------------------

    @property
    def facts(self) -> EngineFacts:
        """Options of the engine."""
        scheduler = self._scheduler
        return EngineFacts(
            max_num_seqs=scheduler.registry.max_num_seqs,
            max_num_batched_tokens=scheduler.predictor.max_num_batched_tokens,
            max_model_len=scheduler.limits.max_model_len,
            page_size=scheduler.blocks.page_size,
            pages=scheduler.blocks.capacity,
            overlap=self._overlap,
            prefix_caching=scheduler.blocks.prefix_caching,
        )

    def totals(self) -> StepTotals:
        """Totals over all steps since the start that were read and delivered."""
        with self._lock:
            records = [*self.steps]
            if records and records[-1] is self._last:  # read after the ring, which has it last
                records.pop()
            # numbers are consecutive
            new = records[max(self._totalled - records[0].number, 0) :] if records else []
            if new:
                self._totals, self._totalled = self._totals.plus(new, self._tile_size), new[-1].number + 1
            resident = self.memories[-1].resident if self.memories else 0
            pauses = self._pauses
            counts = tuple(count for count, _ in pauses.by_generation)
            return msgspec.structs.replace(
                self._totals, resident=resident, pause_seconds=pauses.seconds, pauses=counts
            )

    def _sample(self, now: float) -> Machine:
        return self._machine.sample(now, self._native, *self._programs())

    def trace(self, seconds: float | None = None) -> Trace:
        """The records of the last `seconds` seconds, or all that are kept."""
        scheduler, now = self._scheduler, time.perf_counter()
        held, (running, waiting) = scheduler.blocks.held, scheduler.registry.snapshot()
        live = [request_record(sequence, pages=held(sequence.number)) for sequence in (*running, *waiting)]
        trace = Trace(
            taken=now,
            unix=time.time(),
            facts=self.facts,
            costs=msgspec.Raw(scheduler.predictor.costs.to_json()),
            steps=[*self.steps],
            requests=[*self.requests, *live],
            pauses=[*self._pauses.longest],
            memories=[*self.memories],
            machines=[*self.machines, self._sample(now)] if self.machines else [],
        )
        return trace if seconds is None else trace.last(seconds)


def request_record(sequence: Sequence, ended: float = 0.0, pages: int = 0) -> RequestRecord:
    """The record of a request that ended at this time, or is unfinished."""
    first = sequence.first_token or 0.0
    output = len(sequence.tokens) - sequence.prompt_len
    return RequestRecord(
        request_id=sequence.request_id,
        number=sequence.number,
        client=sequence.client,
        arrival=sequence.arrival,
        scheduled=sequence.scheduled,
        first_token=first if output > 0 else 0.0,  # a prediction until it has arrived
        ended=ended,
        prompt_tokens=sequence.prompt_len,
        cached=sequence.num_cached,
        output_tokens=output,
        preemptions=sequence.num_preemptions,
        reason=sequence.finish_reason or "",
        pages=pages,
        lora="" if sequence.lora is None else sequence.lora.name,
        queued=sequence.queued,
    )
