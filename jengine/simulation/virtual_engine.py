"""The engine's loop on a virtual clock: the real scheduler plans and collects, a cost model says how long each step takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jengine.errors import InvalidArgument, JengineError
from jengine.request import Request, SamplingParams
from jengine.scheduling.step_plan import StepPlan
from jengine.scheduling.work import Work, rows_work
from jengine.simulation.outcome import Outcome, Sample
from jengine.simulation.replay_scheduler import ReplayScheduler
from jengine.simulation.times import StepTimes
from jengine.simulation.trace import OUTPUT_TOKEN, Trace

FOREVER = float("inf")
SHORTEST = 2  # steps that are worth doing at once
REPORTED = 100  # requests at a time
SAMPLES = 500  # moments of a replay that are kept


class InFlight(NamedTuple):
    """A dispatched step whose tokens are not read yet, and when the device has ended it."""

    plan: StepPlan
    done: float


class VirtualEngine:
    """What engine.Engine does, without a device.

    The host takes requests, plans a step and dispatches it, waits for the step before, and collects that. The device begins a step
    once it is dispatched and the one before has ended, so the host's work on a step hides behind the device's on the one before.

    Args:
        rows: requests of the trace to run, ascending.
        params: of all requests; their lengths are the trace's.
        overlap: dispatch a step before the last one's tokens are read.
        fast_forward: advance many steps at once where they only decode. What comes out is the same to the last bit.
        progress: called with the number of requests that have ended, now and then.
    """

    def __init__(
        self,
        scheduler: ReplayScheduler,
        times: StepTimes,
        trace: Trace,
        rows: np.ndarray,
        *,
        params: SamplingParams | None = None,
        overlap: bool = True,
        fast_forward: bool = True,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.scheduler, self.times, self.trace = scheduler, times, trace
        self.now = float(trace.arrivals[rows[0]] if len(rows) else trace.arrivals[0])
        self.outcome = Outcome.empty(len(trace), self.now)
        self.outcome.pages = scheduler.blocks.capacity
        scheduler.clock = lambda: self.now
        self._rows: list[int] = rows.tolist()
        self._arrivals: list[float] = [*trace.arrivals[rows].tolist(), FOREVER]
        self._taken = 0  # of them
        self._params = SamplingParams(temperature=0.0, ignore_eos=True) if params is None else params
        self._params_of: dict[int, SamplingParams] = {}  # by tokens of the output
        self._overlap, self._fast_forward = overlap, fast_forward
        self._free = self.now  # when the device has ended all that was dispatched
        self._in_flight: list[InFlight] = []
        self._progress, self._ended = progress, 0
        self._tokens: list[list[int]] = []  # by sequence, the token that it generates; equal prompts then go on differently
        self._sample_at, self._sample_every = self.now, trace.seconds / SAMPLES

    def run(self) -> Outcome:
        """Until all requests have come and ended."""
        scheduler, outcome = self.scheduler, self.outcome
        while True:
            self._take_arrivals()
            if scheduler.has_work or self._in_flight:
                plan = self._step()
                if plan is not None and not plan.trunk.tiles and self._fast_forward:
                    self._skip(plan)
            elif self._taken < len(self._rows):
                self.now = self._arrivals[self._taken]
            else:
                outcome.end = self.now
                self._progress(self._ended)
                return outcome
            if self.now >= self._sample_at:
                self._sample()

    def _sample(self) -> None:
        """Note this moment; where there are too many, every other one is dropped."""
        scheduler, samples = self.scheduler, self.outcome.samples
        samples.append(Sample(self.now, scheduler.num_running, scheduler.num_waiting, scheduler.blocks.owned))
        if len(samples) >= 2 * SAMPLES:
            del samples[1::2]
            self._sample_every = (self.now - samples[0].seconds) / SAMPLES
        self._sample_at = self.now + self._sample_every

    def _take_arrivals(self) -> None:
        """Queue the requests that have come by now."""
        while self._arrivals[self._taken] <= self.now:
            request = self._request(self._rows[self._taken])
            self._taken += 1
            try:
                self.scheduler.sequence.validate(request, ())
            except InvalidArgument:
                self.outcome.refused += 1
                continue
            self.scheduler.add(request, seed=0, eos_token_ids=())
            if self.trace.prefixes is not None:
                self._tokens.append([-2 - int(request.request_id)])

    def _request(self, row: int) -> Request:
        trace, tokens = self.trace, int(self.trace.outputs[row])
        params = self._params_of.get(tokens)
        if params is None:
            params = self._params_of[tokens] = self._params.clone(max_tokens=tokens)
        return Request(
            request_id=str(row),
            prompt_token_ids=trace.prompt_token_ids(row),
            params=params,
            priority=0 if trace.priorities is None else int(trace.priorities[row]),
            arrival=float(trace.arrivals[row]),
            ttft_ms=_known(trace.ttft_ms, row),
            tpot_ms=_known(trace.tpot_ms, row),
            client="" if trace.clients is None else trace.clients[row] or "",
        )

    def _step(self) -> StepPlan | None:
        """What engine.Engine.step does. Returns the step that was dispatched."""
        scheduler, times = self.scheduler, self.times
        plan = scheduler.schedule()
        if scheduler.rejected:
            scheduler.rejected.clear()  # they are among those that have ended
            self._note_ended()
        if plan is None:
            if self._in_flight:
                self._read_all_but(0)
            else:
                self._wait()
            return None
        self._host(times.host(len(plan.spans), plan.trunk.tiles).plan)
        self._device(times.device(times.base(plan.trunk, plan.sampler), plan.work))
        self._in_flight.append(InFlight(plan, self._free))
        self._read_all_but(1 if self._overlap else 0)
        return plan

    def _wait(self) -> None:
        """Nothing can run: until a batch has formed, or a request comes."""
        then = min(self.scheduler.wakes_at, self._arrivals[self._taken])
        if self.scheduler.has_work and then == FOREVER:
            raise JengineError("the simulation is stuck: requests wait, and none can run")
        if then < FOREVER:
            self.now = max(self.now, then)

    def _host(self, seconds: float) -> None:
        self.now += seconds
        self.outcome.host_seconds += seconds

    def _device(self, seconds: float) -> None:
        self._free = max(self._free, self.now) + seconds
        self.outcome.device_seconds += seconds
        self.outcome.steps += 1

    def _read_all_but(self, left: int) -> None:
        while len(self._in_flight) > left:
            plan, done = self._in_flight.pop(0)
            self.now = max(self.now, done)
            collected = self.scheduler.collect(plan, self._sampled(plan))
            self._host(self.times.host(len(plan.spans), plan.trunk.tiles).collect)
            if plan.trunk.tiles:  # first tokens follow prompts, whose samples come after those of the rows
                for i, sequence, _ in reversed(collected):
                    if plan.spans[plan.samples[i].span].tokens is None:
                        break
                    if len(sequence.tokens) - sequence.prompt_len == 1:
                        self.outcome.first[int(sequence.request_id)] = self.now
            if self.scheduler.ended:
                self._note_ended()

    def _sampled(self, plan: StepPlan) -> list[list[int]]:
        if self.trace.prefixes is None:  # no prompt is like another: none can find the others' tokens
            return [[OUTPUT_TOKEN]] * len(plan.samples)
        return [self._tokens[sample.seq] for sample in plan.samples]

    def _note_ended(self) -> None:
        outcome = self.outcome
        for sequence in self.scheduler.ended:
            row = int(sequence.request_id)
            outcome.preemptions[row], outcome.cached[row] = sequence.num_preemptions, sequence.num_cached
            if sequence.finish_reason == "length":
                outcome.last[row] = self.now
            else:
                reason = str(sequence.stop_reason or sequence.finish_reason)
                outcome.rejected[reason] = outcome.rejected.get(reason, 0) + 1
        self._ended += len(self.scheduler.ended)
        self.scheduler.ended.clear()
        if self._ended >= REPORTED:
            self._progress(self._ended)
            self._ended = 0

    def _skip(self, plan: StepPlan) -> None:
        """Do the steps that the scheduler would plan like this one, which was the last: only what differs between them is worked out."""
        scheduler, times = self.scheduler, self.times
        most = scheduler.steady_steps(ahead=len(self._in_flight))
        if most < SHORTEST:
            return
        rows, size, windows = scheduler.steady_rows(), scheduler.page_size, scheduler.sequence.windows
        entering = defaultdict(list)  # rows by the steps after which they enter a page, modulo the page size
        for sequence in rows:
            entering[-sequence.num_computed % size].append(sequence)
        positions = [sequence.num_computed for sequence in rows]
        context, longest, whole = sum(positions), max(positions), all(window is None for window in windows)
        admits, count, host = scheduler.admits, len(rows), times.host(len(rows), 0)
        trunk, base, steps = plan.trunk, times.base(plan.trunk, plan.sampler), 0
        while steps < most:
            if self._arrivals[self._taken] <= self.now:
                if admits:
                    break
                self._take_arrivals()
            if not scheduler.begin_steady_step(self.now, entering.get(steps % size), steps):
                break
            steps, context, longest = steps + 1, context + count, longest + 1
            if trunk.pages:
                trunk = scheduler.ready.trunk(count, 0, scheduler.blocks.pages_of(longest), count)
                base = times.base(trunk, plan.sampler)
            seconds = times.device(
                base, Work(context, longest) if whole else Work(*rows_work([at + steps - 1 for at in positions], windows))
            )
            scheduler.planned(self.now, seconds)
            self._host(host.plan)
            self._device(seconds)
            if self._overlap:
                read, self._in_flight[0] = self._in_flight[0].done, InFlight(plan, self._free)
            else:
                read = self._free
            self.now = max(self.now, read)
            scheduler.collected(self.now)
            self._host(host.collect)
        scheduler.advance(steps, None if self.trace.prefixes is None else self._tokens)


def _known(column: np.ndarray | None, row: int) -> float | None:
    """A request's own value; nan stands for none."""
    return None if column is None or np.isnan(column[row]) else float(column[row])
