"""Random requests with all features are planned as recorded, to the last bit."""

from __future__ import annotations

import json

import pytest

from tests.scheduling.plan_digests import RECORDED, RUNS, Run


@pytest.mark.parametrize("part", range(10))
def test_plans_are_as_recorded(part):
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded) == RUNS
    seeds = range(part, RUNS, 10)
    assert {seed: Run(seed).go() for seed in seeds} == {seed: recorded[seed] for seed in seeds}
