"""Measurements before the first request, on a device whose steps take exactly known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jengine.engine.setup import measure as measure_module
from jengine.engine.setup.measure import _slope, _two_slopes, measure
from jengine.execution.runner import InFlight, PendingSample, StepResult
from jengine.models.cache import CacheGroup
from jengine.scheduling.costs.step_costs import Cost, Slopes, StepCosts
from jengine.scheduling.step_plan import StepPlan, Work, pairs, rows_work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms, first_needed

TABLE = ProgramTable((1, 8, 16), (8, 16), (1, 2, 4), 16)


class ExactRunner:
    """Its clock advances only by the cost of steps. Checks that every span's pages and parameters are set."""

    def __init__(
        self, *, windows: tuple[int | None, ...] = (None,), max_model_len: int = 4096, num_pages: int = 5000
    ) -> None:
        config = SimpleNamespace(vocab_size=100)
        groups = tuple(CacheGroup("full" if window is None else "window", (0,), window) for window in windows)
        self.spec: Any = SimpleNamespace(
            table=TABLE, groups=groups, num_states=0, max_model_len=max_model_len, num_pages=num_pages,
            page_size=4, host_pages=0, stages=(None,),
            max_slots=12, table_width=-(-max_model_len // 4), model=SimpleNamespace(config=config),
        )  # fmt: skip
        self.costs = StepCosts(
            TABLE,
            {
                **{key: 1e-3 + 1e-5 * TABLE.tokens(key) for key in TABLE.trunks()},
                **{key: 1e-5 * key.rows + 1e-4 * len(key.variant) for key in TABLE.samplers()},
            },
            slopes=Slopes(2e-8, 1e-8, 3e-9),
        )
        self.now = self._ends = 0.0
        self._windows, self._pages, self._params = windows, set[tuple[int, int, int]](), dict[int, Any]()
        self.steps = 0
        self.forgotten = False

    def perf_counter(self) -> float:
        return self.now

    def dispatch(self, plan: StepPlan) -> InFlight:
        return self.sample(self.begin(plan))

    def begin(self, plan: StepPlan) -> PendingSample:
        for reset in plan.resets:
            self._params[reset.slot] = reset.params
        for group, slot, index, page in plan.table:
            assert (
                0 <= index < self.spec.table_width
                and 1 <= slot <= self.spec.max_slots
                and 1 <= page < self.spec.num_pages
            )
            self._pages.add((group, slot, index))
        rows = [span for span in plan.spans if span.tokens is None]
        prompts = plan.spans[len(rows) :]
        for span in plan.spans:
            last = span.start + span.length - 1
            assert last < self.spec.max_model_len and span.slot in self._params
            assert all(
                (group, span.slot, i) in self._pages
                for group in range(len(self._windows))
                for i in range(last // 4 + 1)
            )
        assert len(rows) <= plan.trunk.rows and len(TABLE.place(plan.spans).tiles) <= plan.trunk.tiles
        assert plan.sampler.rows == TABLE.sample_rows(plan.trunk) >= len(plan.samples)
        attended = sum(pairs(span.start, span.length, self._windows) for span in prompts)
        work = rows_work([span.start for span in rows], self._windows)
        assert plan.work == work._replace(attended=attended)
        self._run(self.costs.base(plan.trunk) + self.costs.slopes.seconds(plan.work))
        return PendingSample(plan, {}, None, self.now)

    def sample(self, step: PendingSample) -> InFlight:
        self.steps += 1
        return InFlight(step.plan, self._run(self.costs.base(step.plan.sampler)))

    def read(self, step: InFlight) -> StepResult:
        ends: Any = step.sampled
        self.now = max(self.now, ends)
        return StepResult([], waited=True)

    def forget(self) -> None:
        self.forgotten = True

    def _run(self, seconds: float) -> Any:
        self._ends = max(self._ends, self.now) + seconds
        return self._ends


def measured(
    monkeypatch: pytest.MonkeyPatch, runner: Any, costs: StepCosts, ready: ReadyPrograms | None = None
) -> set[Any]:
    monkeypatch.setattr(measure_module.time, "perf_counter", runner.perf_counter)
    return measure(runner, ready or ReadyPrograms(TABLE), costs, progress=False)


@pytest.mark.parametrize("windows", [(None,), (None, 200)])
def test_an_exact_device_is_measured_exactly(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, costs = ExactRunner(windows=windows), StepCosts(TABLE)
    assert measured(monkeypatch, runner, costs) == {*TABLE.trunks(), *TABLE.samplers()} and runner.forgotten
    exact = runner.costs
    assert costs.slopes == pytest.approx(exact.slopes, rel=1e-6)
    for key, cost in costs.known.items():
        assert cost.seconds == pytest.approx(exact.base(key))


@pytest.mark.parametrize(("max_model_len", "num_pages"), [(2, 2), (16, 5), (64, 17), (4096, 40)])
def test_small_models_and_small_caches_are_measured_too(
    max_model_len: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, costs = ExactRunner(max_model_len=max_model_len, num_pages=num_pages), StepCosts(TABLE)
    measured(monkeypatch, runner, costs)
    for key in TABLE.trunks():
        assert costs.seconds(key) == pytest.approx(runner.costs.seconds(key), rel=0.05)


def test_only_what_is_ready_and_unknown_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, costs = ExactRunner(), StepCosts(TABLE)
    first = first_needed(TABLE)
    assert measured(monkeypatch, runner, costs, ReadyPrograms(TABLE, first)) <= {*first}
    samplers = {key for key in costs.known if isinstance(key, SamplerKey)}
    assert {*costs.known} - samplers == {TrunkKey(16, 0), TrunkKey(8, 1)} and {
        key.variant for key in samplers
    } == {"full"}
    costs.known[TrunkKey(16, 0)] = Cost(7.0)
    measured(monkeypatch, runner, costs)
    assert {*costs.known} == {*TABLE.trunks(), *TABLE.samplers()}
    assert costs.known[TrunkKey(16, 0)].seconds == 7.0
    steps = runner.steps
    assert measured(monkeypatch, runner, costs) == set() and runner.steps == steps


def test_slow_programs_are_run_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, costs = ExactRunner(), StepCosts(TABLE)
    costs.known = {key: Cost(runner.costs.base(key)) for key in [*TABLE.samplers(), *TABLE.trunks()[1:]]}
    slow = TABLE.trunks()[0]
    runner.costs.known[slow].seconds = 5.0
    measured(monkeypatch, runner, costs)
    assert runner.steps == 2 and costs.known[slow].seconds == pytest.approx(5.0)


def test_slopes_are_never_negative() -> None:
    assert _slope([(0, 1.0), (10, 3.0)]) == pytest.approx(0.2)
    assert _slope([(0, 1.0), (10, 0.5)]) == 0.0 == _slope([(5, 1.0), (5, 2.0)])
    base = Work(8, 1), 1.0
    assert _two_slopes(base, (Work(808, 101), 1.9), (Work(408, 401), 1.8)) == pytest.approx((0.001, 0.001))
    assert _two_slopes(base, (Work(808, 101), 1.8), (Work(408, 401), 1.0))[1] == 0.0
    assert _two_slopes(base, (Work(808, 101), 0.5), (Work(408, 401), 0.7)) == (0.0, 0.0)
    assert _two_slopes(base, base, base) == (0.0, 0.0)


def test_a_sampler_is_measured_with_what_its_variant_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[SamplerKey, set[bool]] = {}

    class Watching(ExactRunner):
        def begin(self, plan: StepPlan) -> PendingSample:
            begun = super().begin(plan)
            if plan.sampler.variant == "truncated":
                seen.setdefault(plan.sampler, set()).add(
                    all(self._params[span.slot].top_p < 1.0 for span in plan.spans)
                )
            return begun

    measured(monkeypatch, Watching(), StepCosts(TABLE))
    assert seen and all(values == {True} for values in seen.values())
