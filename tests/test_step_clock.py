"""Only those times of a loop are counted that show how long a step takes on the device."""

from __future__ import annotations

import pytest

from jengine.engine.loop.step_updates import StepClock
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import Span, StepPlan, Work
from jengine.table.program_table import DraftKey, ProgramTable, SamplerKey, TrunkKey

TABLE = ProgramTable((8,), (8,), (1,), 16)
PLAN = StepPlan(TrunkKey(8, 0), SamplerKey(8, "greedy"), [Span(1, 1, 5), Span(2, 2, 6)], work=Work(13, 7))


class Noted(StepCosts):
    """Records its arguments, in milliseconds."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.steps: list[float] = []
        self.planned: list[float] = []
        self.collected: list[float] = []

    def observe(
        self,
        trunk: TrunkKey,
        sampler: SamplerKey,
        work: Work,
        seconds: float,
        draft: DraftKey | None = None,
    ) -> None:
        assert (trunk, sampler, work, draft) == (PLAN.trunk, PLAN.sampler, PLAN.work, PLAN.draft)
        self.steps.append(round(1e3 * seconds, 6))

    def observe_plan(self, rows: int, tiles: int, seconds: float) -> None:
        assert (rows, tiles) == (2, 0)
        self.planned.append(round(1e3 * seconds, 6))

    def observe_collect(self, rows: int, tiles: int, seconds: float) -> None:
        assert (rows, tiles) == (2, 0)
        self.collected.append(round(1e3 * seconds, 6))


@pytest.fixture
def costs() -> Noted:
    return Noted()


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


def read(
    clock: StepClock,
    costs: StepCosts,
    *,
    started: float,
    now: float,
    waited: bool = True,
    counts: bool = True,
) -> None:
    """A step, in milliseconds."""
    clock.read(PLAN, started / 1e3, now / 1e3, costs, waited=waited, counts=counts)


def test_steps_that_overlap_last_from_one_end_to_the_next(clock: StepClock, costs: Noted) -> None:
    for started, now in [(100, 110), (105, 117), (112, 123)]:
        read(clock, costs, started=started, now=now)
    assert costs.steps == [10, 7, 6]


def test_a_step_that_was_started_late_lasts_from_there(clock: StepClock, costs: Noted) -> None:
    read(clock, costs, started=100, now=110)
    read(clock, costs, started=150, now=160)
    assert costs.steps == [10, 10]


def test_a_step_that_nobody_waited_for_is_not_counted_nor_is_the_next(clock: StepClock, costs: Noted) -> None:
    """That step ended at an unknown time before 130. The next one was already running then; the one after was
    not.
    """
    read(clock, costs, started=100, now=130, waited=False)
    read(clock, costs, started=110, now=135)
    read(clock, costs, started=134, now=141)
    assert costs.steps == [6]
    read(clock, costs, started=140, now=150, waited=False)
    read(clock, costs, started=155, now=160)
    assert costs.steps == [6, 5]


def test_a_step_with_other_work_between_is_not_counted_but_its_end_is_known(
    clock: StepClock, costs: Noted
) -> None:
    read(clock, costs, started=100, now=110, counts=False)
    read(clock, costs, started=105, now=117)
    assert costs.steps == [7]


def test_the_host_plans_and_collects(clock: StepClock, costs: Noted) -> None:
    clock.planning(0.100, costs)
    clock.dispatched(PLAN, 0.103, costs)
    read(clock, costs, started=102, now=110)
    clock.planning(0.114, costs)
    clock.dispatched(PLAN, 0.116, costs)
    assert costs.planned == [3, 2] and costs.collected == [4]
    read(clock, costs, started=115, now=120)
    clock.pause()
    clock.planning(9.0, costs)  # a request came after a while
    assert costs.collected == [4]
