"""The contents of a step as pure functions of costs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.admission.admission import Growth, peak_pages
from jengine.scheduling.admission.strategies import (
    HOLD,
    AutoState,
    LoadSigns,
    Situation,
    auto,
    batch_size,
    latency,
    throughput,
)
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.promises.acceptance import FEWEST, OutputLengths
from jengine.scheduling.promises.promises import Outlook, Prompt, Stream
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import ProgramTable

BUCKETS = (1, 2, 4, 8)
TABLE = ProgramTable(row_buckets=(8, 32), mixed_row_buckets=(8, 32), tile_buckets=BUCKETS, tile_size=64)


def step_seconds(decode=0.030, tile=0.010):
    """Linear, with the tiles of the bucket."""
    return lambda rows, tiles: decode + tile * next(b for b in (0, *BUCKETS) if b >= tiles)


def situation(pending, *, rows=8, slack=math.inf, tpot=math.inf, prompts=(), length=None, seconds=None):
    seconds = seconds or step_seconds()
    streams = [Stream(slack, tpot, length)] if tpot < math.inf else []
    attended = [0] * (1 + sum(prompt.tiles for prompt in prompts))
    outlook = Outlook(
        seconds(rows, 0), lambda tiles, _: seconds(rows, tiles), streams, list(prompts), attended
    )
    return Situation(rows, pending, 64, BUCKETS, seconds, outlook)


# --- throughput ---------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 32),
    pending=st.integers(1, 8),
    scale=st.lists(st.floats(0.01, 100.0), min_size=4, max_size=4),
)
def test_no_other_number_of_tiles_carries_more_tokens_a_second(rows, pending, scale):
    took = dict(zip(BUCKETS, scale, strict=True))

    def seconds(rows, tiles):
        return took[next(bucket for bucket in BUCKETS if bucket >= tiles)]

    def rate(tiles):
        return (rows + tiles * 64) / seconds(rows, tiles)

    chosen = throughput(Situation(rows, pending, 64, BUCKETS, seconds)).tiles
    assert 1 <= chosen <= pending
    assert rate(chosen) == pytest.approx(max(rate(tiles) for tiles in range(1, pending + 1)))


def test_of_equal_rates_the_larger_bucket_wins():
    assert (
        throughput(Situation(0, 4, 64, BUCKETS, lambda rows, tiles: {1: 1.0, 2: 2.0, 4: 5.0}[tiles])).tiles
        == 2
    )


def by_costs(costs, rows, pending, work=NO_WORK):
    """The strategy's choice under a cost model, with a table of row buckets 8 and 32."""

    def seconds(rows, tiles):
        return costs.seconds(TABLE.trunk(rows, tiles), work=work)

    return throughput(Situation(rows, pending, 64, BUCKETS, seconds)).tiles


def test_before_measurement_a_nearly_empty_bucket_is_not_worth_it():
    assert by_costs(StepCosts(TABLE), 0, 5) == 4
    assert by_costs(StepCosts(TABLE), 0, 8) == 8


def test_rows_with_long_contexts_make_padding_cheap():
    """They cost the same in each step, so fewer steps are better, although three of eight rows are
    padding.
    """
    assert by_costs(StepCosts(TABLE), 8, 5) == 4
    assert by_costs(StepCosts(TABLE), 8, 5, Work(context=10**8)) == 5


@given(wanting=st.integers(1, 100), fixed=st.floats(0.1, 10), row=st.floats(0.001, 1))
def test_as_many_rows_as_can_run_where_each_costs_less_than_a_step(wanting, fixed, row):
    assert batch_size(wanting, 32, (1, 8, 16, 32), lambda rows, tiles: fixed + row * rows) == min(wanting, 32)


def test_the_batch_is_smaller_where_a_larger_program_would_be_nearly_empty():
    """Nine in a program of sixteen rows take 182 ms a token; eight, and then one, 138 (measured, 134M on two
    cores).
    """
    took = {1: 0.030, 8: 0.108, 16: 0.182, 32: 0.260}

    def seconds(rows, tiles):
        return took[next(bucket for bucket in took if bucket >= rows)]

    assert batch_size(9, 32, tuple(took), seconds) == 8
    assert batch_size(12, 32, tuple(took), seconds) == 12
    assert batch_size(100, 32, tuple(took), seconds) == 32


def gathering(pending, *, rows=31, idle=1, lost=0.0, seconds=None):
    seconds = seconds or (lambda rows, tiles: 0.030 + {0: 0, 1: 0.03, 2: 0.05, 4: 0.08, 8: 0.10}[tiles])
    return throughput(Situation(rows, pending, 64, BUCKETS, seconds, idle=idle, lost=lost, padded=seconds))


def test_prompts_gather_while_others_wait_for_slots_and_fuller_programs_are_faster():
    held = gathering(4)
    assert held.tiles == 0 and held.lost == pytest.approx(0.030 / 31)
    assert gathering(4, idle=0).tiles == 4  # no request waits for a slot
    assert gathering(4, rows=0).tiles == 4  # nothing else to do
    assert gathering(8).tiles == 8  # the largest program is full
    assert gathering(4, seconds=lambda rows, tiles: 0.03 + 0.02 * tiles).tiles == 4  # others are not faster


@given(
    pending=st.sampled_from(BUCKETS),
    idle=st.integers(1, 31),
    scale=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
)
def test_prompts_wait_for_no_longer_than_fuller_programs_could_save(pending, idle, scale):
    took = dict(zip((0, *BUCKETS), (0.03, *(0.03 + part for part in scale)), strict=True))
    lost, saved = 0.0, took[pending]
    for _ in range(1 + math.ceil(saved / (0.03 / 31 * idle))):
        decision = gathering(pending, idle=idle, lost=lost, seconds=lambda rows, tiles: took[tiles])
        if decision.tiles:
            return
        lost = decision.lost
        assert lost < saved
    raise AssertionError(lost)


# --- latency ------------------------------------------------------------------------------------------


def test_without_targets_latency_composes_as_throughput():
    for pending in range(1, 9):
        assert latency(situation(pending)).tiles == throughput(situation(pending)).tiles


def test_tiles_run_only_when_no_stream_is_late_for_them():
    """Eight tiles take 110 ms: a stream that needs a token each 50 ms allows two at a time."""
    prompts = [Prompt(8, 1.0)]
    assert latency(situation(8, slack=0.050, tpot=0.050, prompts=prompts))[:2] == (2, "all in time")
    assert latency(situation(8, slack=0.049, tpot=0.050, prompts=prompts))[:2] == (0, "streams first")


def test_a_stream_of_known_length_makes_up_for_a_burst():
    """It gains 20 ms with each token, so the last four of its five tokens make up for the burst's 80 ms."""
    prompts = [Prompt(8, 0.120)]
    assert latency(situation(8, slack=0.050, tpot=0.050, length=5, prompts=prompts))[:2] == (8, "all in time")
    assert latency(situation(8, slack=0.050, tpot=0.050, length=3, prompts=prompts))[1] != "all in time"


def test_prompts_go_as_fast_as_the_first_of_them_needs():
    """One tile that is due in 45 ms must not wait for a step of eight, which would carry more."""
    urgent, patient = Prompt(1, 0.045), Prompt(7, 1.0)
    assert latency(situation(8, rows=0, prompts=[patient])).tiles == 8
    assert latency(situation(8, rows=0, prompts=[urgent, patient])).tiles == 1


def test_where_not_all_can_be_in_time_the_fewest_are_late():
    """A step with one tile takes 40 ms. A stream that needs its next token in 35 is late for any; without
    one, the prompts are.
    """
    stream = {"slack": 0.035, "tpot": 0.035}
    one, two = [Prompt(1, 0.041)], [Prompt(1, 0.041), Prompt(1, 0.051)]
    assert latency(situation(2, **stream, prompts=two)).tiles == 2, "the stream rather than two prompts"
    patient = [Prompt(1, 10.0)]
    assert latency(situation(1, **stream, prompts=patient))[:2] == (0, "streams first"), "none is late"
    assert latency(situation(1, slack=0.035, tpot=0.035, length=9, prompts=one))[:2] == (1, "all in time"), (
        "it makes up for 5 ms"
    )


# --- memory -------------------------------------------------------------------------------------------


@given(
    sequences=st.lists(st.builds(Growth, st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=12),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_running_sequences_never_hold_more_than_the_forecast(sequences, page_size):
    forecast = peak_pages(sequences, page_size)
    steps = range(max(growth.rest for growth in sequences) + 1)
    held = [
        sum(-(-(tokens + step) // page_size) for tokens, rest in sequences if step <= rest) for step in steps
    ]
    assert max(held) <= forecast <= max(held) + len(sequences)


def test_a_window_bounds_the_forecast():
    assert peak_pages([Growth(100, 100), Growth(100, 100)], 4, [3]) == 6


def test_the_rest_of_an_output_is_guessed_from_longer_ones():
    lengths = OutputLengths()
    assert lengths.expected_rest(0, 500) == 500
    for _ in range(FEWEST):
        lengths.note(20)
    assert (lengths.expected_rest(0, 500), lengths.expected_rest(5, 500), lengths.expected_rest(0, 8)) == (
        20,
        15,
        8,
    )
    assert lengths.expected_rest(20, 500) == 480, "none was longer"
    for _ in range(1000):
        lengths.note(100)
    assert lengths.expected_rest(20, 500) == 80 and lengths.expected_rest(0, 500) == 100, (
        "the first are forgotten"
    )


# --- auto ---------------------------------------------------------------------------------------------

CALM = LoadSigns(targets=False, late=0.0, free_pages=0.9, preempted=False, waiting=0)


def test_auto_changes_only_when_load_has_called_for_it_for_a_while():
    state = AutoState()
    targets = CALM._replace(targets=True)
    state = auto(state, targets, 10.0)
    assert state.strategy == "throughput" and state.wanted == "latency"
    assert auto(state, targets, 10.0 + HOLD / 2).strategy == "throughput"
    assert auto(auto(state, CALM, 10.0 + HOLD / 2), targets, 10.0 + HOLD).strategy == "throughput", (
        "not without a break"
    )
    assert auto(state, targets, 10.0 + HOLD)[:2] == ("latency", "targets can be met")


def test_auto_takes_memory_at_the_first_preemption_and_leaves_it_when_pages_are_plenty():
    state = auto(
        AutoState("latency"), CALM._replace(targets=True, preempted=True, free_pages=0.0, waiting=3), 5.0
    )
    assert state[:2] == ("memory", "pages are short")
    for free in (0.05, 0.2):
        assert auto(state, CALM._replace(free_pages=free, waiting=1), 6.0).wanted is None
    assert auto(state, CALM._replace(free_pages=0.5, waiting=1), 6.0).wanted == "throughput"


def test_auto_gives_targets_up_where_most_are_missed_anyway():
    load = CALM._replace(targets=True, waiting=9)
    assert auto(AutoState("latency"), load._replace(late=0.4), 0.0).wanted is None
    assert auto(AutoState("latency"), load._replace(late=0.6), 0.0).wanted == "throughput"
    assert auto(AutoState("throughput"), load._replace(late=0.4), 0.0).wanted is None
    assert auto(AutoState("throughput"), load._replace(late=0.1), 0.0).wanted == "latency"
