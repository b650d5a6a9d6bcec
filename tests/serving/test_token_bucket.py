"""The rate limit holds for any sequence of charges, and its retry times are correct."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.serving.guards.admission import ROUNDING, TokenBucket

# seconds since the last one, tokens
EVENTS = st.lists(st.tuples(st.floats(0, 300), st.integers(0, 500)), max_size=40)


@given(st.integers(1, 10_000), EVENTS)
def test_no_more_than_what_flows_in(per_minute: int, events: list[tuple[float, int]]) -> None:
    """Requests that come one after the other, each charged when it has ended."""
    bucket, now, used = TokenBucket(per_minute, 0.0), 0.0, 0
    for seconds, tokens in events:
        now += seconds
        wait = bucket.seconds_until_ready(now)
        if wait == 0:
            assert used <= per_minute * (1 + now / 60) - 1 + 2 * ROUNDING * (1 + len(events))
            bucket.charge(tokens, now)
            used += tokens


@given(st.integers(1, 10_000), EVENTS)
def test_who_comes_when_told_may_start_and_not_before(
    per_minute: int, events: list[tuple[float, int]]
) -> None:
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    for seconds, tokens in events:
        now += seconds
        bucket.charge(tokens, now)
        wait = bucket.seconds_until_ready(now)
        if wait > 0.01:
            assert bucket.seconds_until_ready(now + 0.99 * wait) > 0
            now += wait
            assert bucket.seconds_until_ready(now) == 0


@given(st.integers(1, 1000), st.floats(0, 1e6))
def test_idle_time_is_not_saved_up(per_minute: int, idle: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.charge(per_minute, idle)
    assert bucket.seconds_until_ready(idle) == pytest.approx(60.0 / per_minute), (
        "a minute's tokens are gone, however long it was idle"
    )


@given(st.integers(1, 10_000), st.floats(0, 20_000))
def test_what_running_requests_reserve_is_not_there_for_others(per_minute: int, reserved: float) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    bucket.reserved = reserved
    missing = 1.0 - (per_minute - reserved)
    expected = missing * 60.0 / per_minute if missing > ROUNDING else 0.0
    assert bucket.seconds_until_ready(0.0) == expected


def test_a_new_limit_keeps_the_debt() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.charge(119, 0.0)
    assert bucket.seconds_until_ready(0.0) == 60.0
    bucket.resize(600, 0.0)
    assert bucket.seconds_until_ready(0.0) == 6.0
    bucket.resize(1, 1000.0)
    bucket.charge(1, 1000.0)
    assert bucket.seconds_until_ready(1000.0) == 60.0, "what was kept is cut to the new limit"
