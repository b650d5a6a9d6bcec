"""The real engine and scheduler on a virtual clock. Durations on host and device are given, so findings are
deterministic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from jengine.core.request import Request, SamplingParams, TokenMask
from jengine.core.scheduling_options import SchedulingOptions
from jengine.engine.loop import engine as engine_module
from jengine.engine.loop.engine import Engine
from jengine.engine.loop.engine_parts import EngineParts
from jengine.execution.runner import StepResult
from jengine.insight.recording import machine, step_recorder
from jengine.insight.recording.records import Machine
from jengine.insight.recording.trace import Trace
from jengine.scheduling.costs.step_costs import Slopes, StepCosts
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from tests.schedulers import make_scheduler

MS = 1e-3
FIGURES = (
    *("ran", "queued", "loop_ran", "loop_queued", "normal", "low", "stolen", "throttled", "pressure"),
    "switches",
)
TILE = 64


@dataclass
class Clock:
    """Seconds, and those for which the loop's thread had a processor."""

    now: float = 1000.0
    cpu: float = 0.0

    def work(self, seconds: float, processor: float = 1.0) -> None:
        self.now += seconds
        self.cpu += processor * seconds


@dataclass
class InFlight:
    plan: StepPlan
    started: float
    done: float


@dataclass
class Load:
    """Seconds that a step takes besides the device's time according to its costs.

    Attributes:
        slower: times as long as costs say that the device takes.
        processor: share of the host's work in which it has one.
    """

    schedule: float = 0.5 * MS
    dispatch: float = 0.2 * MS
    collect: float = 0.2 * MS
    text: float = 0.1 * MS
    away: float = 0.0
    slower: float = 1.0
    processor: float = 1.0


class VirtualRunner:
    """Steps end when their costs say; each token is 7."""

    def __init__(self, clock: Clock, costs: StepCosts, load: Load) -> None:
        self._clock, self._costs, self._load = clock, costs, load
        self._free = 0.0

    def begin(self, plan: StepPlan) -> InFlight:
        seconds = (
            self._costs.base(plan.trunk)
            + self._costs.base(plan.sampler)
            + self._costs.slopes.seconds(plan.work)
        )
        step = InFlight(plan, self._clock.now, max(self._free, self._clock.now) + self._load.slower * seconds)
        self._free = step.done
        self._clock.work(self._load.dispatch, self._load.processor)
        return step

    def dispatch(self, plan: StepPlan) -> InFlight:
        return self.begin(plan)

    def sample(self, step: InFlight, mask: object = None) -> InFlight:
        return step

    def learn_drafts(self, step: InFlight) -> None:
        """Its steps have none."""

    on_host = True

    def memory_parts(self) -> dict[str, int]:
        return {"weights": 1 << 20}

    def read(self, step: InFlight) -> StepResult:
        waited = step.done > self._clock.now
        self._clock.now = max(self._clock.now, step.done)
        return StepResult([7] * len(step.plan.samples), waited=waited)


@dataclass
class Kernel:
    """A machine with two processors, and what the kernel counts on it: rates, each second.

    Attributes:
        compiled: seconds until all programs are ready, at equal intervals.
    """

    rates: dict[str, float] = field(default_factory=dict)
    programs: int = 0
    compiled: float = 0.0
    begun: float = 0.0

    def sample(self, now: float, loop: int, programs_ready: int, programs: int) -> Machine:
        self.begun = self.begun or now
        since = now - self.begun
        share = min(since / self.compiled, 1.0) if self.compiled else 1.0
        fields = {name: self.rates.get(name, 0.0) * since for name in FIGURES}
        return Machine(
            at=now,
            processors=2,
            programs=self.programs,
            programs_ready=int(share * self.programs),
            **{**fields, "switches": int(fields["switches"])},
        )  # type: ignore[arg-type]


@dataclass
class Virtual:
    """An engine, its clock and its requests."""

    engine: Engine
    clock: Clock
    load: Load
    arrivals: deque[tuple[float, Request]] = field(default_factory=deque)
    each_step: Callable[[], object] = lambda: None
    asked: int = 0

    def ask(self, prompt: int, output: int, at: float = 0.0, mask: TokenMask | None = None) -> None:
        """Adds a request with these lengths. Requests arrive in order."""
        number, self.asked = self.asked, self.asked + 1
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        tokens = [number + 10, *range(prompt - 1)]
        request = Request(
            request_id=f"r{number}", prompt_token_ids=tokens, params=params, arrival=1000.0 + at, mask=mask
        )
        self.arrivals.append((1000.0 + at, request))

    def run(self) -> Trace:
        """Runs until all requests are answered. Returns the trace."""
        while self.arrivals or self.engine.has_work:
            self.turn()
        return self.engine.trace()

    def turn(self) -> None:
        """An iteration of the loop. Without work, advances to the next request."""
        engine, clock, load = self.engine, self.clock, self.load
        while self.arrivals and self.arrivals[0][0] <= clock.now:
            engine.add(self.arrivals.popleft()[1])
        if not engine.has_work:
            clock.now = self.arrivals[0][0]
            return
        engine.step()
        clock.work(load.text, load.processor)
        engine.passed_on()
        clock.now += load.away
        self.each_step()


def make_virtual(
    monkeypatch: pytest.MonkeyPatch,
    *,
    load: Load | None = None,
    places: int = 8,
    pages: int = 1000,
    overlap: bool = True,
    base: float = 10 * MS,
    token: float = 0.02 * MS,
    trunk: Callable[[TrunkKey], float] | None = None,
    budget: int = 0,
    tile: int = TILE,
    options: SchedulingOptions | None = None,
    **drafts: Any,
) -> Virtual:
    """A step takes `base` plus `token` for each of its program's tokens, or the time returned by `trunk`.

    Args:
        drafts: drafter and how_many_drafts of the scheduler.
    """
    clock, load = Clock(), load or Load()
    virtual_time = SimpleNamespace(
        perf_counter=lambda: clock.now,
        thread_time=lambda: clock.cpu,
        time=lambda: clock.now,
        monotonic=lambda: clock.now,
        sleep=clock.work,
    )
    monkeypatch.setattr(machine, "_pauses", machine.GarbagePauses())
    for module in (engine_module, step_recorder, machine):
        monkeypatch.setattr(module, "time", virtual_time)
    budget = budget or places + 8 * tile
    table = ProgramTable.build(max_num_seqs=places, max_num_batched_tokens=budget, tile_size=tile)
    seconds = trunk or (lambda key: base + token * table.tokens(key))
    known: dict[TrunkKey, float] = {key: seconds(key) for key in table.trunks()}
    samplers: dict[SamplerKey, float] = {key: 0.1 * MS for key in table.samplers()}
    costs = StepCosts(table, {**known, **samplers}, slopes=Slopes(0.0, 0.0, 0.0))
    truth = StepCosts(table, {**known, **samplers}, slopes=Slopes(0.0, 0.0, 0.0))
    scheduler = make_scheduler(
        table,
        page_size=16,
        num_pages=pages + 1,
        max_num_seqs=places,
        max_num_batched_tokens=budget,
        max_model_len=2048,
        prefix_caching=False,
        costs=costs,
        options=options or SchedulingOptions(),
        clock=lambda: clock.now,
        **drafts,
    )
    slow(scheduler, "schedule", lambda: clock.work(load.schedule, load.processor))
    slow(scheduler, "collect", lambda: clock.work(load.collect, load.processor))
    monkeypatch.setattr(step_recorder, "MachineClock", Kernel)
    model: Any = SimpleNamespace(vocab_size=500, eos_token_ids=())
    runner: Any = VirtualRunner(clock, truth, load)
    return Virtual(Engine(model, runner, scheduler, EngineParts(overlap=overlap)), clock, load)


def slow(owner: Any, method: str, work: Callable[[], None]) -> None:
    """Makes the method take time."""
    inner = getattr(owner, method)

    def slowed(*arguments: Any) -> Any:
        work()
        return inner(*arguments)

    setattr(owner, method, slowed)
