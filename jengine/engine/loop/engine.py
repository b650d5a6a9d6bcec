"""The engine loop: schedule, pack, run, collect. Handles tokens, no text."""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from collections import deque
from collections.abc import Sequence as List
from functools import partial
from typing import Protocol, cast

import numpy as np

from jengine.base.compiles import engine_compile_count
from jengine.base.errors import JengineError
from jengine.core.request import FinishReason, Request, prompt_seed
from jengine.core.updates import BeamsFound, Ended, Load, Pooled, TokenUpdate, Update
from jengine.core.weights import Version
from jengine.engine.limits import Limits
from jengine.engine.loop.engine_parts import EngineParts, FirstUse, programs_ready
from jengine.engine.loop.step_updates import (
    Reports,
    StepClock,
    add_pooled,
    beam_candidates,
    fill_masks,
    load_of,
    masked_rows,
    prompt_scores,
    several_updates,
    single_updates,
)
from jengine.engine.loop.turns import (
    BATCH_POLL_SECONDS,
    Gate,
    Turn,
    Wanted,
    ended,
    next_step,
    take_programs,
    wait_for_work,
)
from jengine.engine.page_transfer import CLOSE_SECONDS, PageTransfer
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.runner import InFlight, PendingSample, Runner, StepResult
from jengine.insight.recording.cost_report import CostReport, cost_report
from jengine.insight.recording.engines import note_engine
from jengine.insight.recording.records import StepRecord, StepTotals
from jengine.insight.recording.step_recorder import StepRecorder
from jengine.insight.recording.trace import Trace
from jengine.models.config import ModelConfig
from jengine.scheduling.forecasts.expectations import FirstTokenOutlook
from jengine.scheduling.promises.acceptance import REJECTED
from jengine.scheduling.requests.loras import Lora
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import Collected
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.text.mask_thread import MASK_SECONDS, MaskThread


class Runs[T](Protocol):
    """An operation; operations.py has them all."""

    def run(self, engine: Engine) -> T: ...


class Engine:
    """Requests, and the loop that serves them.

    Attributes:
        model: the model's configuration.
        records: the most recent steps and requests.
        weights: the weights, which may be replaced.
        gate: whether it plans steps, or is paused.
        loras: loaded LoRA adapters; None: the table has no programs for them.
    """

    def __init__(
        self, model: ModelConfig, runner: Runner, scheduler: Scheduler, parts: EngineParts | None = None
    ) -> None:
        parts = parts or EngineParts()
        self.model, self.runner, self.scheduler, self.overlap = model, runner, scheduler, parts.overlap
        self._stages = scheduler.cohorts.stages  # as many steps run at once
        self._embedder, self._reranker = parts.embedder, parts.reranker
        self.weights, self.gate = parts.weights, Gate(scheduler.registry.loras)
        self._early: list[Update] = []  # of steps that were read between two calls of `step`
        self.loras = parts.loras
        if self.loras is not None:
            runner.use_adapters(self.loras.packed)
        self._seeds = random.Random(parts.seed)
        # the flag says whether the step's duration may update costs
        self._in_flight: deque[tuple[StepRecord, bool, InFlight]] = deque()
        self._clock = StepClock(self._stages)
        self._programs = parts.programs
        self._first_use = parts.programs if isinstance(parts.programs, FirstUse) else None
        self._taken = -1  # number of these programs in use
        self._count_programs = partial(programs_ready, parts.programs, parts.num_programs)
        self.records = StepRecorder(scheduler, overlap=parts.overlap, programs=self._count_programs)
        self._masks = MaskThread(MASK_SECONDS)
        self._unmasked: dict[int, Exception] = {}  # sampler rows behind drafts whose masks failed
        self._compiles_at_start = engine_compile_count()
        self._outlook, self._reports = FirstTokenOutlook(scheduler), Reports()
        self._last_totals = StepTotals()
        self._recorder = parts.recorder
        note_engine(self)
        # these run at exit at the latest
        self.pages = parts.pages
        closing = (
            parts.save_costs,
            None if parts.page_events is None else parts.page_events.close,
            None if parts.pages is None else parts.pages.close,
        )
        self._closing = [weakref.finalize(self, close) for close in closing if close is not None]

    @property
    def compiles_since_start(self) -> int:
        """XLA compilations of this package's code in this process since warm-up. Each is a bug."""
        return engine_compile_count() - self._compiles_at_start

    @property
    def has_work(self) -> bool:
        """Whether a request or page is left, unless it is paused, or a step was not read."""
        return (self.has_steps and self.gate.plans) or bool(self._in_flight or self._early)

    @property
    def has_steps(self) -> bool:
        """Whether steps are left for requests, or to give pages to a store."""
        return self.scheduler.has_work or (self.pages is not None and self.pages.saving)

    @property
    def has_unused_programs(self) -> bool:
        """Whether programs have arrived that the next steps will run for the first time, with padding."""
        return self._first_use is not None and self._first_use.left and self.gate.plans

    @property
    def has_requests(self) -> bool:
        """Whether a request is unfinished."""
        return self.scheduler.has_work or self.gate.held > 0

    @property
    def limits(self) -> Limits:
        """Limits of requests that it can serve."""
        scheduler, images = self.scheduler, self.scheduler.registry.images
        return Limits(
            sequence=scheduler.limits,
            max_num_seqs=scheduler.registry.max_num_seqs,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            strategies=scheduler.options.strategies,
            embedder=self._embedder,
            reranker=self._reranker,
            lora=None if self.loras is None else self.loras.limits,
            image_rows=images.rows,
            embedding_size=self.model.hidden_size if images.embeddings else 0,
        )

    @property
    def load(self) -> Load:
        """Current load. Thread-safe."""
        first_token = self._reports.figure("first_token_seconds", self._outlook.first_token_seconds, None)
        return load_of(
            self.scheduler,
            compiles_since_start=self.compiles_since_start,
            programs_ready=self._count_programs()[0],
            programs=self._count_programs()[1],
            first_token_seconds=first_token,
            report_faults=self._reports.faults,
            at_gate=self.gate.held,
            loras=None if self.loras is None else self.loras.use,
            store=None if self.pages is None else self.pages.load,
        )

    def add(self, *requests: Request) -> list[Sequence]:
        """Queues a request, or all requests of a prompt, which differ only in their sample index and share a
        seed.

        While the engine is paused, they wait at its gate, and no sequence is returned.

        If they set no seed, a random one is drawn for all. The caller must have validated them with `limits`.

        Raises:
            InvalidArgument: an id is in use, or the adapter is not loaded. Nothing is queued in this case.
        """
        for request in requests:
            self.scheduler.registry.check_id(request.request_id)
        if self.loras is not None:
            self.loras.settle(requests[0].lora_name)
        lora = self.scheduler.registry.loras.get(requests[0].lora_name)
        if self.gate.mode is not None:
            self.gate.hold(requests, lora)
            return []
        return self.queue(requests, lora)

    def queue(self, requests: List[Request], lora: Lora | None) -> list[Sequence]:
        """Queues a prompt's requests, which `add` has accepted: all of them, or none if this raises."""
        first = requests[0]
        seed = (
            self._seeds.getrandbits(64)
            if first.params.seed is None
            else prompt_seed(first.params.seed, first.prompt_token_ids)
        )
        add = partial(self.scheduler.add, seed=seed, eos_token_ids=self.model.eos_token_ids, lora=lora)
        sequences: list[Sequence] = []
        try:
            for request in requests:
                sequences.append(add(request, family=sequences[0].number if sequences else None))
            if self.pages is not None:
                self.pages.came(sequences)
        except BaseException:
            for sequence in sequences:
                self.end(sequence.request_id, "error")
            raise
        self._outlook.came(len(first.prompt_token_ids))
        return sequences

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None = None) -> bool:
        """Ends a request at the caller's wish (stop string, abort). Returns False if it has already ended."""
        sequence = self.scheduler.registry.by_id.get(request_id)
        if sequence is None:
            return self.gate.drop(request_id)
        self.scheduler.finish(sequence, reason, stop_reason)
        self._note_ended()
        return True

    def end_early(self, request_ids: List[str], reason: FinishReason, why: str) -> None:
        """Ends requests between two steps. The next call of `step` returns their updates."""
        for request_id in request_ids:
            self.end(request_id, reason, why)
            self._early.append(Ended(request_id, reason, why))

    def costs(self) -> CostReport:
        """Step costs as measured so far. Thread-safe."""
        return cost_report(self.scheduler.predictor.costs)

    def trace(self, seconds: float | None = None) -> Trace:
        """Records of the last `seconds` seconds, or all that are kept. Thread-safe."""
        return self._reports.figure("trace", partial(self.records.trace, seconds), None) or Trace.empty(
            self.records.facts
        )

    def memory_parts(self) -> dict[str, int]:
        """Bytes of weights, cache and programs on this process's devices. Thread-safe."""
        return self.runner.memory_parts()

    @property
    def on_host(self) -> bool:
        """Whether device memory is this process's host memory."""
        return self.runner.on_host

    def totals(self) -> StepTotals:
        """Totals over all steps since the start. Thread-safe."""
        self._last_totals = self._reports.figure("totals", self.records.totals, self._last_totals)
        return self._last_totals

    def passed_on(self) -> None:
        """The caller has converted the output of `step` to text, or sent it."""
        self.records.passed_on(time.perf_counter())

    @property
    def weights_version(self) -> Version:
        """The version of the weights that steps use; see `LLM.update_weights`."""
        return self.weights.version

    def settle(self) -> None:
        """Reads all steps in flight. The next call of `step` returns their updates."""
        self._early += self._read_all_but(0)

    def do[T](self, operation: Runs[T]) -> T:
        """Does an operation that its `check` has accepted, and returns the answer; see operations.py."""
        return operation.run(self)

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until all programs are there or no more come. Returns whether all are, if unused yet."""
        return self._programs is None or self._programs.wait(timeout)

    def close(self) -> None:
        """Stops compiling and saves step costs. May be called repeatedly."""
        if self.pages is not None:
            self._save_pages(self.pages)
        if self._programs is not None:
            self._programs.stop()
        if self._recorder is not None:
            self._recorder.close()
        for close in self._closing:
            close()

    def _save_pages(self, pages: PageTransfer) -> None:
        """Steps without requests until pages are saved, for a bounded time, unless the engine sleeps."""
        until = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(Exception):  # of an engine that has failed
            while pages.saving and not self.has_requests and self.has_work and time.monotonic() < until:
                self.step()

    def step(self) -> list[Update]:
        """Dispatches the next step, then reads the previous one. Returns its updates."""
        turn, begun = self.turn(), None
        wanted = next(turn)
        if wanted is not None:
            begun = (self.runner.begin if wanted.masked else self.runner.dispatch)(wanted.plan)
        return ended(turn, begun)

    def turn(self, *, waits: bool = True) -> Turn:
        """A step that the caller dispatches. waits: whether it may sleep if nothing is to be done."""
        if self._first_use is not None and self.gate.plans:
            self._first_use.run_next(busy=self.scheduler.has_work, in_flight=bool(self._in_flight))
        if self._programs is not None:
            self._taken = take_programs(self.scheduler, self._programs, self._taken)
        awaited = self.scheduler.searches.awaited or self.scheduler.speculation.awaited
        updates, self._early = self._early, []
        if not (self.gate.plans and (self.has_steps or not self.gate.mode)):
            yield None
            updates += self._read_all_but(0)
            if not updates and waits:  # a thread waits for outputs of a paused engine
                time.sleep(BATCH_POLL_SECONDS)
            return updates
        if awaited:
            updates += self._read_all_but(0)
        now = time.perf_counter()
        self._clock.planning(now, self.scheduler.predictor.costs)
        self.records.turn(now)
        plan, beside = next_step(self.scheduler, self.runner, self.records, self.pages)
        planned = time.perf_counter()
        self.records.planned()
        updates += self._rejected()
        if plan is None:
            passed = yield None
            updates += self._read_all_but(self._recent if passed else max(len(self._in_flight) - 1, 0))
            if not updates and waits:
                wait_for_work(self.scheduler, self.runner, self.pages)
            return updates
        masked = plan.sampler.variant == "full" and bool(masked_rows(plan, self.scheduler.registry.by_number))
        begun = yield Wanted(plan, masked)
        if masked:
            begun = cast(PendingSample, begun)
            # a mask depends on the previous token; the trunk runs meanwhile
            updates += self._read_all_but(plan.overtakes)
            self.runner.learn_drafts(begun)  # which masks depend on, too
            unmasked = time.perf_counter()
            mask, failed = self._mask(plan)
            updates += failed
            masking = time.perf_counter() - unmasked
            step = self.runner.sample(begun, mask)
            now = time.perf_counter()
            self._clock.pause()  # computing masks does not count as collecting a step
        else:
            masking, step = 0.0, cast(InFlight, begun)
            now = time.perf_counter()
            self._clock.dispatched(plan, now, self.scheduler.predictor.costs)
        record = self.records.dispatched(plan, planned, step.started, now, masking)
        counted = any([reset.counted is not None for reset in plan.resets])
        full = len(self._in_flight) >= self._stages  # the others say nothing about one stage's seconds
        alone = not masked and not counted and not beside and (full or self._stages == 1)
        self._in_flight.append((record, alone, step))
        updates += self._read_all_but(self._recent)
        self.records.turned(time.perf_counter())
        return updates

    @property
    def _recent(self) -> int:
        """How many of the steps that run at once are its own, with the one that the host is ahead."""
        return self.scheduler.cohorts.recent(self._stages if self.overlap else self._stages - 1)

    def _rejected(self) -> list[Update]:
        """Updates for requests that the scheduler has just rejected, since their targets cannot be met."""
        rejected, self.scheduler.acceptance.rejected = self.scheduler.acceptance.rejected, []
        self._note_ended()
        return [Ended(sequence.request_id, "abort", REJECTED) for sequence in rejected]

    def _read_all_but(self, left: int) -> list[Update]:
        updates: list[Update] = []
        while len(self._in_flight) > left:
            record, counts, step = self._in_flight.popleft()
            begun = time.perf_counter()
            result = self.runner.read(step)
            alone, now = not result.tiles, time.perf_counter()
            device = self._clock.read(
                step.plan,
                step.started,
                now,
                self.scheduler.predictor.costs,
                waited=result.waited,
                counts=counts and alone,
            )
            if "score" in result.tiles:
                updates += prompt_scores(step.plan, result.tiles["score"], self.scheduler)
            if "pool" in result.tiles:
                add_pooled(step.plan, result.tiles["pool"], self.scheduler)
            before = self.scheduler.speculation.right
            updates += self._collect(step, result)
            self.records.read(
                record,
                begun,
                now,
                time.perf_counter(),
                waited=result.waited,
                device=device,
                accepted=self.scheduler.speculation.right - before,
            )
        if not (self._in_flight or self._early or (self.scheduler.has_work and self.gate.plans)):
            self._clock.pause()
            self.records.pause()
        if self.loras is not None:
            self.loras.settle()
        return updates

    def _mask(self, plan: StepPlan) -> tuple[np.ndarray, list[Ended]]:
        """The step's token mask, see logits.mask_words, and requests that end because theirs failed."""
        mask = np.full((plan.sampler.rows, mask_words(self.model.vocab_size)), ALL_ALLOWED)
        masked = masked_rows(plan, self.scheduler.registry.by_number)
        self._unmasked = unmasked = dict[int, Exception]()  # only of this step: masks given up may still fail
        failures = self._masks.run([partial(_fill, unmasked, mask, *wanted) for wanted in masked])
        # each error ends only its own request
        failed = [(masked[i][1], error) for i, error in sorted(failures.items())]
        return mask, [
            Ended(sequence.request_id, "error", self._fail(sequence, error)) for sequence, error in failed
        ]

    def _fail(self, sequence: Sequence, error: Exception) -> str:
        """Ends one request with an error. Returns its stop_reason."""
        why = str(error) if isinstance(error, JengineError) else f"{type(error).__name__}: {error}"
        self.scheduler.finish(sequence, "error", why)
        self._note_ended()
        return why

    def _note_ended(self) -> None:
        """Records finished requests."""
        if self.scheduler.registry.ended:
            now, ended = time.perf_counter(), self.scheduler.registry.ended
            self.scheduler.registry.ended = []
            for sequence in ended:
                self.records.ended(sequence, now)
                if self._recorder is not None:
                    self._reports.figure("recording", partial(self._recorder.ended, sequence), None)

    def _collect(self, step: InFlight, result: StepResult) -> list[TokenUpdate | Pooled | BeamsFound]:
        collected = self.scheduler.collect(
            step.plan, result.tokens, beam_candidates(step.plan, result, self.scheduler)
        )
        if self._unmasked:
            collected = self._until_unmasked(collected)
        self._note_ended()
        got, version = result.logprobs, self.weights_version
        if got is not None:
            self._accept(collected)
        if got is not None or step.plan.steps > 1 or step.plan.guesses:
            return several_updates(collected, got, version)
        return single_updates(collected, version)

    def _until_unmasked(self, collected: Collected) -> Collected:
        """Drops tokens from rows whose masks failed on, and fails their requests.

        The step whose masks failed is the first to be collected after that: the ones before it were read.
        """
        remaining, failed = Collected([], [], []), set[int]()
        unmasked, self._unmasked = self._unmasked, {}
        for row, s, token in collected:
            if row in unmasked:
                self._fail(s, unmasked[row])
                failed.add(s.number)
            if s.number not in failed:
                remaining.add(row, s, token)
        return remaining

    def _accept(self, collected: Collected) -> None:
        """Tells masks their requests' new tokens. An error ends only its own request."""
        for s, token in zip(collected.sequences, collected.tokens, strict=True):
            if s.request.mask is not None and s.finish_reason is None:
                try:
                    s.request.mask.accept(token)
                except Exception as error:
                    self._fail(s, error)


def _fill(
    unmasked: dict[int, Exception], mask: np.ndarray, row: int, sequence: Sequence, drafts: List[int]
) -> None:
    """Fills the masks of a sequence's sampler rows, from `row` on."""
    failed = fill_masks(mask[row : row + 1 + len(drafts)], sequence, drafts)
    if failed is not None:
        unmasked[row + failed[0]] = failed[1]
