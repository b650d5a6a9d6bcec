"""Measures step costs before the first request, with real pages at several contexts and overlapping steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax

from jengine.base.progress import Progress, progress_bar
from jengine.core.request import SamplingParams
from jengine.execution.draft import pack_drafts
from jengine.execution.kinds import DeviceCall
from jengine.execution.runner import InFlight, Runner
from jengine.models.cache import paged
from jengine.scheduling.costs.step_costs import Cost, Slopes, StepCosts, SwapCosts
from jengine.scheduling.step_plan import (
    Encoding,
    Sample,
    SlotReset,
    Span,
    StepPlan,
    Swaps,
    Work,
    pairs,
    rows_work,
)
from jengine.table.program_table import (
    SWAPS,
    VARIANTS,
    BurstKey,
    DraftKey,
    EncoderKey,
    SamplerKey,
    TableKey,
    TrunkKey,
    Variant,
)
from jengine.table.ready_programs import ReadyPrograms

RUNS = 4  # of each step, after a warm-up run; the lower median counts
ENOUGH = 0.3  # seconds for all runs of a step: slow steps run less often
SHORT, LONG, LONGEST = 32, 1024, 4096  # tokens before decode rows, as far as the model and the cache allow
PASTS = 0, 1024, 2048  # tokens before prompts
PARAMS = {  # typical parameters of requests of each variant
    "greedy": SamplingParams(temperature=0.0),
    "sample": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=0.8, top_p=0.95),
    "full": SamplingParams(temperature=0.8, top_p=0.95, logprobs=1),
}


def measure(runner: Runner, ready: ReadyPrograms, costs: StepCosts, *, progress: Progress) -> set[TableKey]:
    """Adds missing costs of ready programs, and returns these. Must run before the first request."""
    bench, known = Bench(runner, ready), costs.known
    rows = {runner.spec.table.sample_rows(key) for key in ready.trunks()}
    samplers = sorted(
        [key for key in ready.samplers() if key.rows in rows],
        key=lambda key: (VARIANTS.index(key.variant), key.rows),
    )
    fitted = any(isinstance(key, TrunkKey) for key in known)
    # samplers first, since their costs are subtracted from those of trunks
    every: list[TableKey] = [*samplers, *ready.trunks(), *ready.bursts(), *ready.drafts()]
    missing = [key for key in [*every, *map(EncoderKey, ready.encoders)] if key not in known]
    for key in progress_bar(missing, desc="measuring", unit="program", show=progress):
        if isinstance(key, TrunkKey) and not fitted:
            costs.slopes, fitted = bench.slopes(), True
        known[key] = bench.cost(key, costs)
    if runner.spec.host_pages and costs.swaps is None:
        costs.swaps = bench.swaps()
    runner.forget()
    return {*missing}


class Bench:
    """Steps without requests. Each slot has a state and pages of the cache, shared if there are too few."""

    def __init__(self, runner: Runner, ready: ReadyPrograms) -> None:
        self._runner, self._ready, self._spec = runner, ready, runner.spec
        spec = self._spec
        self._stages = len(spec.stages)
        self._groups = paged(spec.groups)
        self._windows = tuple(group.window for group in self._groups)
        # maximum context of a sequence
        self._limit = min(spec.max_model_len, (spec.num_pages - 1) // len(self._groups) * spec.page_size) - 1
        self._pages: set[tuple[int, int]] = set()  # (slot, index) of block table entries that are set
        self._params: dict[int, Variant] = {}  # by slot

    def rows_of(self, key: TrunkKey) -> int:
        return min(key.rows, self._spec.max_slots)

    def sampler(self, key: SamplerKey) -> float:
        """Seconds of a sampler alone, run repeatedly on the same hidden states."""
        table = self._spec.table
        trunk = min(
            (trunk for trunk in self._ready.trunks() if table.sample_rows(trunk) == key.rows),
            key=table.tokens,
        )
        plan = self.step(trunk, self.rows_of(trunk), SHORT, variant=key.variant)
        plan.sampler = key
        begun = self._runner.begin(plan)
        return self._typical(self._runner.sample(begun), lambda: self._runner.sample(begun))

    def drafts(self, key: DraftKey) -> float:
        """Seconds of a program that drafts, for all rows that have a slot, after SHORT tokens."""
        trunk = self._ready.trunk(key.rows, 0, key.pages)
        plan = self.step(trunk, min(key.rows, self._spec.max_slots), SHORT)
        self._runner.read(self._runner.dispatch(plan))
        plan.table = []  # which the slots have now
        for span in plan.spans:
            span.guesses, span.following = key.tokens, [-2] * key.tokens
        packed = pack_drafts(key, self._spec.page_size, plan)
        nothing = StepPlan(trunk, plan.sampler)

        def dispatch() -> InFlight:
            return InFlight(nothing, self._runner.call(DeviceCall(key, packed)))

        return self._typical(dispatch(), dispatch)

    def encoder(self, key: EncoderKey) -> float:
        """Seconds of a program that encodes images, of padding: its work does not depend on them."""
        times = []
        for _ in range(RUNS):
            begun = time.perf_counter()
            jax.block_until_ready(self._runner.encode(Encoding(key.patches)))
            times.append(time.perf_counter() - begun)
            if sum(times) > ENOUGH:
                break
        return min(times)

    def slopes(self) -> Slopes:
        """Fits the slopes to one trunk of decode rows and one of tiles, at three contexts each."""
        trunks = self._ready.trunks()
        table = self._spec.table
        decode = max((key for key in trunks if not key.tiles), key=table.tokens)
        tiles = self._ready.tile_buckets[len(self._ready.tile_buckets) // 2]
        mixed = min((key for key in trunks if key.tiles), key=lambda key: (key.rows, abs(key.tiles - tiles)))
        rows = self.rows_of(decode)
        long = min(LONG, self._limit, self._limit_of(rows))
        points = [(step.work, self.seconds(step)) for step in (
            self.step(decode, rows, SHORT),
            self.step(decode, rows, long),
            self.step(decode, rows, SHORT, first=min(LONGEST, self._limit)),
        )]  # fmt: skip
        context, longest = _two_slopes(*points)
        room = max(self._limit - mixed.tiles * table.tile_size, 0)
        steps = [self.prompt(mixed, past) for past in sorted({min(past, room) for past in PASTS})]
        return Slopes(context, longest, _slope([(step.work.attended, self.seconds(step)) for step in steps]))

    def step(
        self, key: TrunkKey, rows: int, context: int, *, first: int | None = None, variant: Variant = "greedy"
    ) -> StepPlan:
        """Decode rows after `context` tokens, the first after `first`, and a prompt's start in each tile."""
        size = self._spec.table.tile_size
        positions = [
            min(at, self._limit)
            for at in [context if first is None else first, *[context] * (rows - 1)][:rows]
        ]
        spans = self._rows(positions)
        length = min(size, self._limit + 1)
        spans += [
            Span(0, 1 + tile % self._spec.max_slots, 0, length, self._tokens(length))
            for tile in range(key.tiles)
        ]
        work = Work(attended=key.tiles * pairs(0, length, self._windows))
        return self._plan(key, spans, variant, work.plus(rows_work(positions, self._windows)))

    def burst(self, key: BurstKey) -> StepPlan:
        """All rows, limited by the number of slots, after SHORT tokens."""
        at, rows = max(min(SHORT, self._limit - key.steps), 0), self.rows_of(key.trunk)
        spans = self._rows([at] * rows, key.steps)
        work = rows_work([at] * rows, self._windows)
        plan = self._plan(
            key.trunk, spans, key.sampler.variant, Work(work.context * key.steps, work.longest * key.steps)
        )
        plan.samples = [Sample(i, 0, span.seq, span.slot) for i, span in enumerate(spans)]
        plan.sampler, plan.steps = key.sampler, key.steps
        return plan

    def prompt(self, key: TrunkKey, past: int) -> StepPlan:
        """One prompt in all tiles, after `past` tokens if the limit allows."""
        length = min(key.tiles * self._spec.table.tile_size, self._limit + 1 - past)
        span = Span(0, 1, past, length, self._tokens(length))
        return self._plan(key, [span], "greedy", Work(attended=pairs(past, length, self._windows)))

    def seconds(self, plan: StepPlan) -> float:
        """Seconds of a step among equal ones."""
        again = replace(plan, resets=[], table=[])  # which the slots have then
        return self._typical(self._runner.dispatch(plan), lambda: self._runner.dispatch(again))

    def cost(self, key: TableKey, costs: StepCosts) -> Cost:
        """The cost of a program. Trunks and bursts are measured in steps, without the step's other costs."""
        match key:
            case SamplerKey():
                return Cost(self.sampler(key))
            case DraftKey():
                return Cost(self.drafts(key))
            case EncoderKey():
                return Cost(self.encoder(key))
            case BurstKey():
                plan, sampling = self.burst(key), 0.0
            case TrunkKey():
                # requests as the sampler was measured with, since its cost is subtracted
                variant = self._ready.sampler(key, VARIANTS[0]).variant
                plan = self.step(key, self.rows_of(key), SHORT, variant=variant)
                sampling = costs.base(plan.sampler)
            case _:
                raise AssertionError(f"{key} is no part of a step's costs")
        seconds = self.seconds(plan)
        others = costs.slopes.seconds(plan.work) + sampling
        return Cost(max(seconds - others, seconds / 10))

    def swaps(self) -> SwapCosts:
        """Seconds until a call's maximum number of pages, or all of them if there are fewer, have moved."""
        runner, count = self._runner, min(SWAPS, self._spec.staged, self._spec.num_pages - 1)
        numbers, times = range(1, count + 1), []

        def seconds(swaps: Swaps) -> float:
            begun = time.perf_counter()
            runner.swap(swaps)
            jax.block_until_ready(runner.moving)
            runner.swapped()
            return time.perf_counter() - begun

        for _ in range(RUNS + 1):
            spill = seconds(Swaps(spills=[(0, number, number) for number in numbers]))
            fetch = seconds(Swaps(fetches=[(number, number) for number in numbers]))
            times.append((spill, fetch, seconds(Swaps(fills=[(0, number, number) for number in numbers]))))
        return SwapCosts(*[sorted(column)[(RUNS - 1) // 2] for column in zip(*times[1:], strict=True)])

    def _typical(self, first: InFlight, dispatch: Callable[[], InFlight]) -> float:
        """Typical seconds of a step. Each is dispatched before the previous one is read, as the engine does.
        In a pipeline, as many are under way as there are stages: these are seconds of the slowest stage.
        """
        begun = time.perf_counter()
        stages = self._stages
        running, times = deque([first, *[dispatch() for _ in range(stages)]]), [begun]
        while running:
            self._runner.read(running.popleft())
            times.append(time.perf_counter())
            if len(times) + len(running) < RUNS + 1 + stages and times[-1] - begun < ENOUGH:
                running.append(dispatch())
        return typical(times[stages:])

    def _plan(self, key: TrunkKey, spans: list[Span], variant: Variant, work: Work) -> StepPlan:
        samples = [Sample(i, span.length - 1, span.seq, span.slot) for i, span in enumerate(spans)]
        sampler = self._ready.sampler(key, variant)
        plan = StepPlan(key, sampler, spans, samples[: sampler.rows], work=work, overtakes=self._stages)
        for span in spans:
            if self._params.get(span.slot) != variant:
                self._params[span.slot] = variant
                plan.resets.append(SlotReset(span.slot, PARAMS[variant], span.slot, 0, 1, ()))
            plan.table += self._entries(span)
            if self._spec.num_states:
                tiles = 1 if span.tokens is None else -(-span.length // self._spec.table.tile_size)
                span.states = [span.slot] * (1 + tiles)
        return plan

    def _entries(self, span: Span) -> Iterable[tuple[int, int, int, int]]:
        """Block table entries that a span needs and that are not set yet."""
        spec = self._spec
        for index in range((span.start + span.length - 1) // spec.page_size + 1):
            if (span.slot, index) not in self._pages:
                self._pages.add((span.slot, index))
                for group in range(len(self._groups)):
                    number = (group * spec.max_slots + span.slot - 1) * spec.table_width + index
                    yield group, span.slot, index, 1 + number % (spec.num_pages - 1)

    def _rows(self, positions: list[int], length: int = 1) -> list[Span]:
        """Decode rows at these positions, with known tokens: slots without requests hold no positions."""
        tokens = self._tokens(len(positions))
        return [
            Span(slot, slot, at, length, known=token)
            for slot, (at, token) in enumerate(zip(positions, tokens, strict=True), 1)
        ]

    def _limit_of(self, rows: int) -> int:
        """Maximum tokens of each of `rows` sequences if they share no pages."""
        return max((self._spec.num_pages - 1) // len(self._groups) // rows * self._spec.page_size - 1, 1)

    def _tokens(self, count: int) -> list[int]:
        vocab = self._spec.model.config.vocab_size
        return [i * 7919 % vocab for i in range(1, count + 1)]


def typical(times: list[float]) -> float:
    """The lower median of seconds, of two steps together: a busy host reads one late, the next at once."""
    apart = min(2, len(times) - 1)
    seconds = sorted((after - before) / apart for before, after in zip(times, times[apart:], strict=False))
    return seconds[(len(seconds) - 1) // 2]


Point = tuple[Work, float]


def _two_slopes(base: Point, wide: Point, deep: Point) -> tuple[float, float]:
    """Seconds per token of context and of the longest row, not negative: exact for three steps, or a fit."""
    (a, b, c), (d, e, f) = (
        (point[0].context - base[0].context, point[0].longest - base[0].longest, point[1] - base[1])
        for point in (wide, deep)
    )
    determinant = a * e - b * d
    if determinant:
        context, longest = (c * e - b * f) / determinant, (a * f - c * d) / determinant
        if context >= 0.0 and longest >= 0.0:
            return context, longest
    return max((a * c + d * f) / (a * a + d * d), 0.0) if a or d else 0.0, 0.0


def _slope(points: list[tuple[int, float]]) -> float:
    """Slope of the least-squares line through these points, not negative."""
    count = len(points)
    x, y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    square = sum((at - x) ** 2 for at, _ in points)
    return max(sum((at - x) * (seconds - y) for at, seconds in points) / square, 0.0) if square else 0.0
