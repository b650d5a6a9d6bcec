"""Replays of engines with bursts, batch invariance, a host tier or recurrent states."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.replay import EngineShape, replay
from jengine.capacity.simulation.summary import Outcome
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.scheduling.scheduler import Scheduler
from tests.simulation.shapes import make_shape, poisson
from tests.simulation.test_fast_forward import both

FEATURES: dict[str, dict[str, Any]] = {
    "bursts": {"num_scheduler_steps": 8, "tile_size": 8},
    "automatic bursts": {"num_scheduler_steps": "auto", "tile_size": 8},
    "batch invariance": {"batch_invariant": True},
    "a host tier": {"host_pages": 100, "num_pages": 40},
    "recurrent states": {"num_states": 30},
    "adapters": {"max_loras": 2},
}


def conversations(requests: int, shared: int = 6) -> RequestTrace:
    """Requests of which every third begins with the same blocks of four tokens."""
    draw, rows, prefixes = random.Random(3), [], []
    for i in range(requests):
        blocks = [j if i % 3 == 0 and j < shared else 1000 * (i + 1) + j for j in range(8)]
        rows.append((0.02 * i, 4 * len(blocks) + 1, draw.randint(4, 40)))
        prefixes.append(blocks)
    return make_trace(rows, prefixes=prefixes, block=4)


def run(
    shape: EngineShape, trace: RequestTrace, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, list[Any], list[Scheduler]]:
    """The outcome, all plans, and the schedulers."""
    plans, schedulers, schedule = [], {}, Scheduler.schedule

    def noted(self: Scheduler) -> Any:
        plan = schedule(self)
        schedulers[id(self)] = self
        plans.append(plan)
        self.check_integrity()
        return plan

    monkeypatch.setattr(Scheduler, "schedule", noted)
    outcome = replay(shape, trace)
    return outcome, [plan for plan in plans if plan is not None], [*schedulers.values()]


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_gets_its_tokens(monkeypatch, name, overlap):
    for trace in (poisson(1, 40, rate=60.0), conversations(40)):
        with monkeypatch.context() as patch:
            outcome, plans, _ = run(make_shape(overlap=overlap, **FEATURES[name]), trace, patch)
        assert np.all(outcome.last >= outcome.first) and np.all(outcome.first > trace.arrivals)
        slow, fast = both(make_shape(overlap=overlap, **FEATURES[name]), trace)
        np.testing.assert_equal(fast, slow)
        assert plans


def test_bursts_take_fewer_steps_and_less_of_the_host():
    trace = poisson(2, 20, rate=5.0, output=(40, 60))
    single, burst = replay(make_shape(), trace), replay(make_shape(num_scheduler_steps=8), trace)
    assert burst.steps < single.steps / 3 and burst.host_seconds < single.host_seconds / 2


def test_adapters_share_places_and_cost_what_their_programs_do(monkeypatch):
    """Three adapters in two places, and none. Prefixes are found by the same adapter alone."""
    names = [None, "a", "b", "c"]
    trace = conversations(60)
    adapted = dataclasses.replace(trace, loras=[names[i // 3 % 4] for i in range(60)])
    outcome, plans, _ = run(make_shape(max_loras=2), adapted, monkeypatch)
    assert {plan.trunk.adapted for plan in plans} == {0, 2}
    without = replay(make_shape(max_loras=2), trace)
    assert outcome.end > without.end and 0 < outcome.cached.sum() < without.cached.sum()
    with pytest.raises(InvalidArgument, match="trace='a': is an adapter: simulate with enable_lora"):
        replay(make_shape(), adapted)


def test_batch_invariant_steps_have_rows_or_tiles(monkeypatch):
    _, plans, _ = run(make_shape(batch_invariant=True, num_pages=60), poisson(1, 40, rate=300.0), monkeypatch)
    assert not any(plan.trunk.rows and plan.trunk.tiles for plan in plans) and any(
        plan.trunk.tiles for plan in plans
    )


def test_pages_come_back_from_the_host(monkeypatch):
    """With little device memory, the common beginning is evicted between its uses; fetching it is fast."""
    shape = make_shape(num_pages=40, host_pages=100)
    shape.costs.swaps = SwapCosts(1e-5, 1e-5, 1e-5)
    outcome, _, schedulers = run(shape, conversations(60), monkeypatch)
    without = replay(make_shape(num_pages=40), conversations(60))
    assert sum(scheduler.prefixes.host_hits for scheduler in schedulers) > 0
    assert outcome.cached.sum() > without.cached.sum()


def test_states_are_found_at_snapshots(monkeypatch):
    outcome, plans, _ = run(make_shape(num_states=30, tile_size=8), conversations(60), monkeypatch)
    assert outcome.cached.sum() > 0 and np.all(outcome.cached % 8 == 0)
    assert all(span.states for plan in plans for span in plan.spans)
