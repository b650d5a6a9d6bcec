"""Running many steps at once gives bit-identical results to single steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.capacity.simulation.replay import EngineShape, replay
from jengine.capacity.simulation.trace import RequestTrace, make_trace
from tests.simulation.shapes import make_shape, poisson

LENGTHS = st.tuples(st.sampled_from([0.0, 0.001, 0.02, 0.3]), st.integers(1, 60), st.integers(1, 60))
GROUPS = st.sampled_from([(None,), (8,), (None, 12)])


def both(shape: EngineShape, trace: RequestTrace) -> tuple[dict, dict]:
    slow, fast = (dataclasses.asdict(replay(shape, trace, fast_forward=fast)) for fast in (False, True))
    del slow["samples"], fast["samples"]  # moments that happened to be looked at
    return slow, fast


TARGETS = st.sampled_from([np.nan, 1.0, 5.0, 50.0])
SCHEDULING = st.one_of(
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["fcfs", "priority", "fair"]),
            "strategy": st.sampled_from(["throughput", "memory", "auto"]),
        }
    ),
    st.fixed_dictionaries({"strategy": st.just("latency"), "on_late": st.sampled_from(["serve", "reject"])}),
    st.fixed_dictionaries(
        {
            "batching": st.sampled_from(["dynamic", "static"]),
            "batch_wait_ms": st.sampled_from([0.0, 3.0, 30.0]),
        }
    ),
)


@settings(max_examples=200)
@given(
    requests=st.lists(LENGTHS, min_size=1, max_size=12),
    blocks=st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=12, max_size=12),
    priorities=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    clients=st.lists(st.sampled_from(["a", "b"]), min_size=12, max_size=12),
    targets=st.lists(st.tuples(TARGETS, TARGETS), min_size=12, max_size=12),
    windows=GROUPS,
    num_pages=st.sampled_from([32, 36, 48, 400]),
    max_num_seqs=st.sampled_from([1, 2, 4]),
    page_buckets=st.sampled_from([(0,), (4, 8, 32)]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    scheduling=SCHEDULING,
)
def test_fast_forward_changes_nothing(requests, blocks, priorities, clients, targets, scheduling, **options):
    count, now, rows = len(requests), 0.0, []
    for gap, prompt, output in requests:
        now += gap
        rows.append((now, prompt, output))
    ttft, tpot = np.array(targets[:count]).T
    trace = make_trace(rows, prefixes=[tuple(ids) for ids in blocks[:count]], block=4,
        priorities=np.array(priorities[:count]),
                       clients=clients[:count], ttft_ms=ttft, tpot_ms=tpot)  # fmt: skip
    slow, fast = both(make_shape(**scheduling, **options), trace)
    np.testing.assert_equal(fast, slow)


def test_it_skips_most_calls_of_the_scheduler(monkeypatch):
    shape, trace = make_shape(), poisson(0, 20, rate=5.0, output=(40, 60))
    calls = []
    schedule = type(shape.scheduler()).schedule
    monkeypatch.setattr(
        "jengine.scheduling.scheduler.Scheduler.schedule", lambda self: calls.append(1) or schedule(self)
    )
    slow, fast = both(shape, trace)
    np.testing.assert_equal(fast, slow)
    one_by_one = slow["steps"]
    assert len(calls) < 1.5 * one_by_one


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_the_scheduler_itself_decides_the_same(monkeypatch, policy):
    """A replay looks costs up, and collects steps that only decode, in a faster way."""
    shape, trace = make_shape(max_num_seqs=16, tiles=8, policy=policy), poisson(1, 60, rate=300.0)
    trace = dataclasses.replace(trace, clients=["a", "b", "b"] * 20)
    quick = replay(shape, trace, fast_forward=False)
    monkeypatch.delattr("jengine.capacity.simulation.fast_forward.ConstantPredictor.seconds")
    monkeypatch.setattr(
        "jengine.capacity.simulation.fast_forward.FastForward.collect",
        lambda self, *step: self._scheduler.collect(*step),
    )
    np.testing.assert_equal(
        dataclasses.asdict(replay(shape, trace, fast_forward=False)), dataclasses.asdict(quick)
    )


@pytest.mark.parametrize("num_pages", [26, 200])
def test_pages_that_nobody_can_find_are_not_kept_unless_a_sequence_comes_back(num_pages):
    shape, trace = (
        make_shape(num_pages=num_pages),
        poisson(0, 30, rate=200.0, prompt=(20, 30), output=(40, 60)),
    )
    slow, fast = both(shape, trace)
    np.testing.assert_equal(fast, slow)
    assert (slow["preemptions"].sum() > 0) == (num_pages == 26)
