"""Random requests with all features are planned as recorded, to the last bit."""

from __future__ import annotations

import json
import random

import pytest

from tests.scheduling import plan_digests
from tests.scheduling.plan_digests import RECORDED, RUNS, Run

DRAWN = random.Random


@pytest.mark.parametrize("part", range(10))
def test_plans_are_as_recorded(part):
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded) == RUNS
    seeds = range(part, RUNS, 10)
    assert {seed: Run(seed).go() for seed in seeds} == {seed: recorded[seed] for seed in seeds}


@pytest.mark.parametrize("seed", range(0, RUNS, 10))
def test_fair_shares_of_one_client_are_first_come_first_served(seed, monkeypatch):
    """Servers have policy "fair" by default, and often one client."""

    def planned(policy, clients):
        class Draw(DRAWN):
            def choice(self, options):
                drawn = super().choice(options)
                return (
                    policy
                    if "fcfs" in options
                    else clients.get(drawn, drawn)
                    if options == ["a", "b", ""]
                    else drawn
                )

        monkeypatch.setattr(plan_digests.random, "Random", Draw)
        return Run(seed).go()

    one, two = {"a": "", "b": ""}, {"b": ""}
    assert planned("fair", one) == planned("fcfs", one)
    if seed == 0:
        assert planned("fair", two) != planned("fcfs", two), "with two clients it is another order"
