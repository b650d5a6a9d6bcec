"""Results of a replay, compared with arithmetic and with properties of any trace."""

from __future__ import annotations

import numpy as np
import pytest

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.replay import replay, replicas_needed
from jengine.capacity.simulation.summary import Targets, bars, in_target, report, summarize
from jengine.capacity.simulation.trace import make_trace
from jengine.core.request import SamplingParams
from jengine.scheduling.costs.step_costs import Cost
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import TrunkKey
from tests.simulation.shapes import make_shape, poisson


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_takes_what_its_steps_take(overlap):
    """A prompt of 10 tokens in a tile and on two rows, and four rows. With overlap, the host's work hides
    behind the device's, but at both ends.
    """
    shape = make_shape(overlap=overlap)
    costs, table = shape.costs, shape.table
    outcome = replay(shape, make_trace([(5.0, 10, 5)]))
    steps = [
        (TrunkKey(8, 1), Work(9 + round(0.3 * 10), 10, attended=36)),
        *[(TrunkKey(8, 0), Work(length, length)) for length in (11, 12, 13, 14)],
    ]
    device = [costs.seconds(trunk, table.sampler(trunk, "greedy"), work) for trunk, work in steps]
    prompt, row = costs.host_seconds(1, 2), costs.host_seconds(1, 0)
    assert (outcome.steps, outcome.refused) == (5, 0)
    assert outcome.device_seconds == pytest.approx(sum(device))
    assert outcome.host_seconds == pytest.approx(sum(prompt) + 4 * sum(row))
    if overlap:
        assert outcome.first[0] == pytest.approx(prompt.plan + device[0] + prompt.collect)
        assert outcome.last[0] == pytest.approx(prompt.plan + sum(device) + row.collect)
    else:
        assert outcome.first[0] == pytest.approx(prompt.plan + device[0] + prompt.collect)
        assert outcome.last[0] == pytest.approx(sum(device) + outcome.host_seconds)


def test_a_slow_host_sets_the_pace():
    shape = make_shape()
    for _ in range(2000):
        shape.costs.observe_plan(1, 0, 0.02)
        shape.costs.observe_collect(1, 0, 0.03)
    outcome = replay(shape, make_trace([(0.0, 5, 30)]))
    assert outcome.device_seconds < 0.1
    assert outcome.last[0] == pytest.approx(outcome.host_seconds, rel=0.01)


@pytest.mark.parametrize("prefixes", [None, [(1,), (1,)]])
def test_requests_may_end_before_their_limits(prefixes):
    """Each gets the tokens that the trace says, at the same times as if it had asked for no more."""
    shape, rows = make_shape(overlap=False), [(0.0, 20, 5), (0.01, 30, 9)]
    exact = replay(shape, make_trace(rows, prefixes=prefixes, block=16), fast_forward=False)
    found = replay(shape, make_trace(rows, prefixes=prefixes, block=16, limits=np.array([40, 60])))
    assert found.steps == exact.steps and not found.rejected
    np.testing.assert_array_equal(found.first, exact.first)
    np.testing.assert_array_equal(found.last, exact.last)


def test_equal_prefixes_are_found():
    shape = make_shape()
    rows = [(float(i), 50, 4) for i in range(3)]
    shared = replay(shape, make_trace(rows, prefixes=[(1, 2), (1, 2), (3, 2)], block=16))
    assert shared.cached.tolist() == [0, 32, 0]
    assert replay(shape, make_trace(rows)).cached.tolist() == [0, 0, 0]


def test_what_never_fits_is_refused():
    outcome = replay(make_shape(max_model_len=64), make_trace([(0.0, 64, 1), (0.0, 60, 10), (0.1, 5, 5)]))
    assert outcome.refused == 1 and np.isnan(outcome.first).tolist() == [True, False, False]


def test_pressure_preempts_and_everything_ends():
    outcome = replay(make_shape(num_pages=24), poisson(0, 30, rate=1e4, prompt=(20, 30), output=(40, 60)))
    assert outcome.preemptions.sum() > 0 and not np.isnan(outcome.last).any()


def test_two_engines_share_the_requests():
    shape, trace = make_shape(), poisson(1, 40, rate=200.0)
    one, two = replay(shape, trace), replay(shape, trace, replicas=2)
    assert two.engines == 2 and not np.isnan(two.last).any()
    assert np.mean(two.last - trace.arrivals) < np.mean(one.last - trace.arrivals)
    alone = replay(shape, trace, replicas=2, only=1)
    np.testing.assert_equal(alone.last[1::2], two.last[1::2])
    assert np.isnan(alone.last[::2]).all()


def test_the_fewest_engines_within_targets():
    shape, trace = make_shape(), poisson(2, 200, rate=400.0)
    targets = Targets(ttft_ms=40.0, share=0.9)

    def share(replicas: int) -> float:
        return float(in_target(replay(shape, trace, replicas=replicas), trace, targets).mean())

    found = replicas_needed(shape, trace, targets)
    assert found is not None
    count, outcome = found
    assert count > 1 and outcome.engines == count
    assert share(count) >= 0.9 > share(count - 1)
    assert replicas_needed(shape, trace, Targets(ttft_ms=0.1)) is None  # less than a step takes


def test_targets_of_the_trace_come_before_the_others():
    trace = make_trace([(0.0, 10, 1), (1.0, 10, 1), (2.0, 10, 1)], ttft_ms=np.array([0.01, np.nan, np.nan]))
    outcome = replay(make_shape(), trace)
    assert in_target(outcome, trace, Targets(ttft_ms=100.0)).tolist() == [False, True, True]
    # a single token has no gap
    assert in_target(outcome, trace, Targets(tpot_ms=0.01)).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("fields", "names"), [({"ttft_ms": 0.0}, "target_ttft_ms"), ({"share": 1.5}, "target_share")]
)
def test_bad_targets_are_named(fields, names):
    with pytest.raises(InvalidArgument, match=names):
        Targets(**fields)


def test_a_summary_says_what_the_columns_say():
    shape, trace, targets = make_shape(), poisson(3, 50, rate=100.0), Targets(ttft_ms=20.0, tpot_ms=2.0)
    outcome = replay(shape, trace)
    summary = summarize(outcome, trace, targets)
    first = outcome.first - trace.arrivals
    assert summary.first_token[50] == pytest.approx(np.median(first))
    assert summary.output_tokens_per_second == pytest.approx(trace.outputs.sum() / outcome.end)
    assert summary.goodput == pytest.approx(in_target(outcome, trace, targets).sum() / outcome.end)
    text = report(summary, trace, targets, outcome)
    assert (
        f"{1e3 * np.median(first):,.1f}" in text
        and "within 20 ms to the first token and 2 ms per output token" in text
    )


def test_bars_show_where_values_are():
    assert bars("load", np.arange(100.0), [0.0] * 50 + [8.0] * 50)[16:76] == " " * 30 + "█" * 30


def test_costlier_samplers_take_longer():
    shape, trace = make_shape(), poisson(5, 10, rate=10.0)
    shape.costs.known.update(
        {key: Cost(5e-3) for key in shape.table.samplers() if key.variant == "truncated"}
    )
    greedy, truncated = (
        replay(shape, trace, params=params) for params in (None, SamplingParams(top_p=0.9, ignore_eos=True))
    )
    assert truncated.device_seconds > 2 * greedy.device_seconds
