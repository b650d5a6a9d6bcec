"""Predictions for requests, compared with the scheduler on a virtual clock."""

from __future__ import annotations

import numpy as np
import pytest

from jengine.capacity.simulation.fast_forward import StepTimes
from jengine.capacity.simulation.replay import EngineShape
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from jengine.capacity.simulation.virtual_engine import VirtualEngine
from jengine.core.request import Request
from jengine.scheduling.forecasts.expectations import Hypothetical, expect
from jengine.scheduling.forecasts.forecast import SequenceGroup, together
from tests.simulation.shapes import make_shape, poisson


class Asking(VirtualEngine):
    """Asks for a prediction before the last request of a trace arrives."""

    def _request(self, row: int) -> Request:
        request = super()._request(row)
        if row == len(self.trace) - 1:
            self.came = self.now
            (self.expected,) = expect(
                self.scheduler, [Hypothetical(len(request.prompt_token_ids), request.params.max_tokens)]
            )
        return request


def expected_and_found(
    shape: EngineShape, trace: RequestTrace
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(seconds to the first and the last token) of the last request."""
    engine = Asking(shape.scheduler(), StepTimes(shape.costs), trace, np.arange(len(trace)))
    outcome = engine.run()
    return tuple(engine.expected), (outcome.first[-1] - engine.came, outcome.last[-1] - engine.came)


@pytest.mark.parametrize("prompt", [1, 20, 100])
def test_alone(prompt):
    expected, found = expected_and_found(make_shape(), make_trace([(0.0, prompt, 20)]))
    assert expected == pytest.approx(found, rel=0.05, abs=2e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [100.0, 1000.0, 1e6])
def test_beside_others(rate, seed):
    """From an engine that keeps up to one where everything comes at once and waits."""
    shape = make_shape(max_num_seqs=16, num_pages=2000)
    expected, found = expected_and_found(shape, poisson(seed, 60, rate))
    assert expected == pytest.approx(found, rel=0.2, abs=5e-3)


def test_few_pages_make_it_wait():
    trace = poisson(0, 30, 1e6, prompt=(50, 60), output=(50, 60))
    few, found = expected_and_found(make_shape(max_num_seqs=16, num_pages=100), trace)
    many, _ = expected_and_found(make_shape(max_num_seqs=16, num_pages=2000), trace)
    assert few[0] > 1.5 * many[0]
    assert few[0] == pytest.approx(found[0], rel=0.3)


def test_several_are_expected_one_behind_the_other():
    scheduler = make_shape(max_num_seqs=2).scheduler()
    first, second, third = expect(scheduler, [Hypothetical(30, 50)] * 3)
    assert first.first_token <= second.first_token < first.last_token < third.first_token
    assert scheduler.registry.snapshot() == ([], [])


def test_cached_tokens_and_samples_count():
    scheduler = make_shape(max_num_seqs=4).scheduler()
    ((cold,), (hit,), (several,)) = (
        expect(scheduler, [asked])
        for asked in (Hypothetical(100, 9), Hypothetical(100, 9, cached=96), Hypothetical(100, 9, 5))
    )
    assert hit.first_token < 0.5 * cold.first_token
    assert several.last_token > 1.5 * cold.last_token  # the fifth waits for one of the four rows


def test_those_alike_are_taken_together():
    jobs = [SequenceGroup(0, 10 * i, i) for i in range(1, 101)]
    few = together(jobs, 10)
    assert len(few) == 10 and sum(job.size for job in few) == 100
    assert few[0] == SequenceGroup(0, 55, 6, 10)
    assert together(jobs[:5], 10) == jobs[:5]
