"""The engine's loop on a virtual clock: the real scheduler plans and collects, a cost model predicts each
step's duration."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jengine.base.errors import InvalidArgument, JengineError
from jengine.capacity.simulation.fast_forward import FastForward, StepTimes
from jengine.capacity.simulation.summary import EngineSample, Outcome
from jengine.capacity.simulation.trace import END_TOKEN, OUTPUT_TOKEN, OWN_TOKENS, RequestTrace
from jengine.core.request import Request, SamplingParams
from jengine.scheduling.costs.step_costs import StepCosts, SwapCosts
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan, Work, rows_work
from jengine.table.program_table import SWAPS

FOREVER = float("inf")
SHORTEST = 2  # minimum number of steps to run at once
SAMPLES = 500  # maximum number of samples


class DispatchedStep(NamedTuple):
    """A dispatched step whose tokens are not read yet, and the time at which the device has finished it."""

    plan: StepPlan
    done: float


class VirtualEngine:
    """Simulates engine.Engine without a device.

    The host receives requests, plans a step and dispatches it, waits for the previous step, and collects
    that. The device begins a step when it has been dispatched and the previous one has finished. So host and
    device work overlap. In a pipeline, each stage does so, and takes the same time for a step; a step also
    waits for the tokens that its rows read.

    Args:
        rows: requests of the trace to run, ascending.
        params: sampling parameters of all requests, except their lengths, which come from the trace.
        overlap: whether to dispatch a step before the previous one's tokens are read.
        fast_forward: whether to run many decode-only steps at once. The result is bit-identical.
        progress: called with the number of requests that have ended since the last call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        trace: RequestTrace,
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
        self._steady = FastForward(scheduler)
        self._host_pages = (
            None if scheduler.blocks.tier is None else VirtualHost(scheduler, scheduler.predictor.costs)
        )
        self.outcome.pages = scheduler.blocks.capacity
        scheduler.clock = lambda: self.now
        self._load_adapters()
        self._rows: list[int] = rows.tolist()
        self._arrivals: list[float] = [*trace.arrivals[rows].tolist(), FOREVER]
        self._taken = 0  # number of requests queued so far
        self._limits = trace.outputs if trace.limits is None else trace.limits
        exact = trace.limits is None
        self._params = SamplingParams(temperature=0.0, ignore_eos=exact) if params is None else params
        self._params_of: dict[int, SamplingParams] = {}  # keyed by max_tokens
        self._overlap = overlap
        self._stages = scheduler.cohorts.stages
        simple = exact and self._stages == 1
        self._fast_forward = fast_forward and simple and not scheduler.speculation.drafting
        self._collect = self._steady.collect if simple else scheduler.collect
        self._eos = () if exact else (END_TOKEN,)
        # times at which the stages have finished all dispatched steps; one stage is a whole device
        self._free = [self.now] * self._stages
        self._in_flight: list[DispatchedStep] = []
        self._progress = progress
        # by sequence, the token that it generates, so that equal prompts diverge
        self._tokens: list[list[int]] = []
        self._sample_at, self._sample_every = self.now, trace.seconds / SAMPLES

    def _load_adapters(self) -> None:
        """All adapters of the trace are loaded at its start; writing one to its place takes no time."""
        adapters = self.scheduler.registry.loras
        names = sorted({name for name in self.trace.loras or () if name})
        if names and not adapters.places:
            raise InvalidArgument("trace", names[0], "is an adapter: simulate with enable_lora")
        for name in names:
            adapters.load(name, adapters.next_number())

    def run(self) -> Outcome:
        """Runs until all requests have arrived and ended."""
        scheduler, outcome = self.scheduler, self.outcome
        while True:
            self._take_arrivals()
            if scheduler.has_work or self._in_flight:
                plan = self._step()
                if plan is not None and not plan.prompts and self._fast_forward:
                    self._skip(plan)
            elif self._taken < len(self._rows):
                self.now = self._arrivals[self._taken]
            else:
                outcome.end = self.now
                return outcome
            if self.now >= self._sample_at:
                self._sample()

    def _sample(self) -> None:
        """Records a sample. If there are too many, drops every other one."""
        registry, samples = self.scheduler.registry, self.outcome.samples
        owned = self.scheduler.blocks.owned
        samples.append(EngineSample(self.now, registry.num_running, registry.num_waiting, owned))
        if len(samples) >= 2 * SAMPLES:
            del samples[1::2]
            self._sample_every = (self.now - samples[0].seconds) / SAMPLES
        self._sample_at = self.now + self._sample_every

    def _take_arrivals(self) -> None:
        """Queues the requests that have arrived by now."""
        while self._arrivals[self._taken] <= self.now:
            request = self._request(self._rows[self._taken])
            self._taken += 1
            try:
                self.scheduler.limits.validate(request, ())
            except InvalidArgument:
                self.outcome.refused += 1
                continue
            self.scheduler.add(request, seed=0, eos_token_ids=self._eos)
            if self.trace.prefixes is not None:
                self._tokens.append([OWN_TOKENS + int(request.request_id)])

    def _request(self, row: int) -> Request:
        trace, tokens = self.trace, int(self._limits[row])
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
            lora_name=None if trace.loras is None else trace.loras[row],
        )

    def _step(self) -> StepPlan | None:
        """Like engine.Engine.step. Returns the dispatched step."""
        scheduler, times = self.scheduler, self.times
        host = self._host_pages
        if host is not None:
            host.report(self.now)
        if scheduler.speculation.awaited:
            self._read_all_but(0)
        plan = scheduler.schedule()
        swapping = 0.0 if host is None else host.begin(self.now)
        if scheduler.acceptance.rejected:
            scheduler.acceptance.rejected.clear()  # they are also among the ended sequences
            self._note_ended()
        if plan is None:
            if self._in_flight:
                self._read_all_but(len(self._in_flight) - 1)
            else:
                self._wait()
            return None
        self._host(times.host(len(plan.spans), plan.trunk.tiles).plan)
        base = times.base(plan.trunk, plan.sampler) if plan.steps == 1 else times.burst(plan.burst)
        self._device(times.device(base, plan.work) + swapping, plan.overtakes)
        self._in_flight.append(DispatchedStep(plan, self._free[-1]))
        self._read_all_but(self._stages if self._overlap else self._stages - 1)
        return plan

    def _wait(self) -> None:
        """Nothing can run: goes on to a batch's start, an arrival, or pages from the host."""
        then = min(self.scheduler.wakes_at, self._arrivals[self._taken])
        if self._host_pages is not None:
            then = min(then, self._host_pages.next_done)
        if self.scheduler.has_work and then == FOREVER:
            raise JengineError("the simulation is stuck: requests wait, and none can run")
        if then < FOREVER:
            self.now = max(self.now, then)

    def _host(self, seconds: float) -> None:
        self.now += seconds
        self.outcome.host_seconds += seconds

    def _device(self, seconds: float, overtakes: int = 0) -> None:
        at = self.now
        if self._stages > 1 and len(self._in_flight) > overtakes:
            at = max(at, self._in_flight[-1 - overtakes].done)
        for stage, free in enumerate(self._free):
            at = self._free[stage] = max(at, free) + seconds
        self.outcome.device_seconds += seconds
        self.outcome.steps += 1

    def _read_all_but(self, left: int) -> None:
        while len(self._in_flight) > left:
            plan, done = self._in_flight.pop(0)
            self.now = max(self.now, done)
            collected = self._collected(plan)
            self._host(self.times.host(len(plan.spans), plan.trunk.tiles).collect)
            if plan.prompts:  # samples of prompts, which follow those of the rows, are first tokens
                decoding = len(plan.spans) - plan.prompts
                for i, sequence, _ in reversed([*collected]):
                    if plan.samples[i].span < decoding:
                        break
                    if len(sequence.tokens) - sequence.prompt_len == 1:
                        self.outcome.first[int(sequence.request_id)] = self.now
            if self.scheduler.registry.ended:
                self._note_ended()

    def _collected(self, plan: StepPlan) -> Iterable[tuple[int, Sequence, int]]:
        tokens = self._sampled(plan)
        if plan.guesses:
            return self.scheduler.collect(plan, [token for (token,) in tokens])
        return self._collect(plan, tokens)

    def _sampled(self, plan: StepPlan) -> list[list[int]]:
        """The tokens of each sample. Behind a draft, whether its token counts depends on that draft."""
        spans, by_number = plan.spans, self.scheduler.registry.by_number
        lengths = [spans[sample.span].length if plan.steps > 1 else 1 for sample in plan.samples]
        if self.trace.prefixes is None:  # no two prompts have a common one to find another's tokens by
            tokens = [[OUTPUT_TOKEN] * length for length in lengths]
        else:
            sampled = zip(plan.samples, lengths, strict=True)
            tokens = [self._tokens[sample.seq] * length for sample, length in sampled]
        if self.trace.limits is None:
            return tokens
        for sample, generated in zip(plan.samples, tokens, strict=True):
            if (sequence := by_number.get(sample.seq)) is not None:
                known = len(sequence.tokens) - sequence.prompt_len
                drafts = sample.offset if spans[sample.span].guesses else 0
                left = int(self.trace.outputs[int(sequence.request_id)]) - known - drafts
                if left <= len(generated):
                    generated[max(left - 1, 0)] = END_TOKEN
        return tokens

    def _note_ended(self) -> None:
        outcome = self.outcome
        for sequence in self.scheduler.registry.ended:
            row = int(sequence.request_id)
            outcome.preemptions[row], outcome.cached[row] = sequence.num_preemptions, sequence.num_cached
            if sequence.finish_reason in ("length", "stop"):
                outcome.last[row] = self.now
            else:
                reason = str(sequence.stop_reason or sequence.finish_reason)
                outcome.rejected[reason] = outcome.rejected.get(reason, 0) + 1
        self._progress(len(self.scheduler.registry.ended))
        self.scheduler.registry.ended.clear()

    def _skip(self, plan: StepPlan) -> None:
        """Runs steps that the scheduler would plan like `plan`. Computes only their differences."""
        scheduler, steady, times = self.scheduler, self._steady, self.times
        limit = steady.steps(plan, ahead=len(self._in_flight))
        if limit < SHORTEST:
            return
        rows, size, windows = steady.rows, scheduler.blocks.page_size, scheduler.limits.windows
        # rows by the number of steps after which they enter a page, modulo the page size
        entering = defaultdict(list)
        for sequence in rows:
            entering[-sequence.num_computed % size].append(sequence)
        positions = [sequence.num_computed for sequence in rows]
        context, longest, whole = sum(positions), max(positions), all(window is None for window in windows)
        admits, count, host = steady.admits, len(rows), times.host(len(rows), 0)
        trunk, base, steps = plan.trunk, times.base(plan.trunk, plan.sampler), 0
        while steps < limit:
            if self._arrivals[self._taken] <= self.now:
                if admits:
                    break
                self._take_arrivals()
            if not steady.begin(self.now, entering.get(steps % size), steps):
                break
            steps, context, longest = steps + 1, context + count, longest + 1
            if trunk.pages:
                pages = scheduler.blocks.pages_of(longest)
                trunk = scheduler.predictor.ready.trunk(count, 0, pages, count, adapted=trunk.adapted)
                base = times.base(trunk, plan.sampler)
            seconds = times.device(
                base,
                Work(context, longest) if whole else rows_work([at + steps - 1 for at in positions], windows),
            )
            scheduler.timeline.plan(self.now, seconds)
            self._host(host.plan)
            self._device(seconds)
            if self._overlap:
                read, self._in_flight[0] = self._in_flight[0].done, DispatchedStep(plan, self._free[-1])
            else:
                read = self._free[-1]
            self.now = max(self.now, read)
            scheduler.timeline.collect(self.now)
            self._host(host.collect)
        steady.advance(steps, None if self.trace.prefixes is None else self._tokens)


def _known(column: np.ndarray | None, row: int) -> float | None:
    """A request's own value, or None for nan."""
    return None if column is None or np.isnan(column[row]) else float(column[row])


# --- the host tier: page copies take the measured time and then finish ---------------------------------


class Copies(NamedTuple):
    """Page copies that finish together: spills into these host pages, fetches into these places."""

    done: float
    saved: list[int]
    staged: list[int]


class VirtualHost:
    """Stands for execution's host store. Copies run one after the other, in parallel with steps."""

    def __init__(self, scheduler: Scheduler, costs: StepCosts) -> None:
        self._scheduler, self._costs = scheduler, costs.swaps or SwapCosts()
        self._under_way: deque[Copies] = deque()

    @property
    def next_done(self) -> float:
        """Time at which the next copies finish; inf: there are none."""
        return self._under_way[0].done if self._under_way else float("inf")

    def report(self, now: float) -> None:
        """Tells the scheduler which copies have finished. To be called before each step is planned."""
        while self._under_way and self._under_way[0].done <= now:
            _, saved, staged = self._under_way.popleft()
            self._scheduler.swapped(saved, staged)

    def begin(self, now: float) -> float:
        """Begins the copies that are planned with a step. Returns the seconds that they add to it."""
        swaps = self._scheduler.take_swaps()
        if swaps is None:
            return 0.0
        spills, fetches = [host for _, _, host in swaps.spills], [place for _, place in swaps.fetches]
        if spills or fetches:
            begin = max(now, self._under_way[-1].done if self._under_way else now)
            seconds = _batches(len(spills)) * self._costs.spill + _batches(len(fetches)) * self._costs.fetch
            self._under_way.append(Copies(begin + seconds, spills, fetches))
        return _batches(len(spills)) * self._costs.spill + _batches(len(swaps.fills)) * self._costs.fill


def _batches(pages: int) -> int:
    return -(-pages // SWAPS)
