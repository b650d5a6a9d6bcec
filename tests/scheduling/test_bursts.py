"""Bursts in the scheduler: outputs equal those of single steps, with any ends and waiting requests."""

from __future__ import annotations

from typing import Any

import pytest

from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.rules.bursts import LONGEST
from jengine.scheduling.step_plan import NO_WORK
from jengine.table.program_table import BurstKey
from tests.scheduling.strict_device import Loop


def loop(**changes: Any) -> Loop:
    options = {
        "max_model_len": 96,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return Loop(**{**options, "num_scheduler_steps": 8, **changes})


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9,)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_tokens_are_those_of_single_steps(
    ahead: int, page_size: int, windows: tuple[int | None, ...]
) -> None:
    """Sequences end or stop at every position of a burst, and reach the maximum length."""
    one = loop(page_size=page_size, windows=windows, num_pages=900)
    for seed in range(24):
        one.add(
            [seed + 1, 2, 3][: 1 + seed % 3],
            max_tokens=20 + seed,
            ignore_eos=seed % 3 == 0,
            stop_token_ids=[seed % 7 + 1] * (seed % 2),
        )
    one.add([5], max_tokens=None, ignore_eos=True)
    one.drain(ahead)
    assert one.device.bursts > 10


def test_a_row_takes_part_as_long_as_it_may() -> None:
    one = loop()
    for tokens in (3, 9, 10, 40):
        one.add([tokens], max_tokens=tokens, ignore_eos=True)
    one.step(0)
    lengths = []
    while one.step(0):
        lengths.append([span.length for span in one.last.spans])
    assert lengths == [[2, 8, 8, 8], [1, 8], [8], [8], *[[1]] * 7]
    one.check_idle()


def test_the_longest_sequence_ends_within_a_burst() -> None:
    """Another sequence continues. No program for more pages than max_model_len needs is requested."""
    one = loop(max_model_len=40, page_size=4, page_buckets=(1, 5, 10))
    one.add([1] * 20, max_tokens=None, ignore_eos=True)
    for tokens in (31, 36):
        one.add([tokens], max_tokens=tokens, ignore_eos=True)
    one.drain(1)
    assert one.device.bursts > 2


@pytest.mark.parametrize(("how", "bursts"), [(8, True), ("auto", False)])
def test_auto_waits_until_nothing_does(how: int | str, bursts: bool) -> None:
    one = loop(num_scheduler_steps=how, max_num_seqs=2)
    running = [one.add([i], max_tokens=40, ignore_eos=True) for i in range(2)]
    waiting = one.add([3], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        one.step(0)
    assert (one.device.bursts > 0) is bursts and waiting.slot == 0
    one.abort(waiting)
    one.drain(1)
    assert one.device.bursts > 2 and all(sequence.finish_reason == "length" for sequence in running)


@pytest.mark.parametrize(("seconds", "bursts"), [(LONGEST * 0.99, True), (LONGEST * 1.01, False)])
def test_auto_runs_short_bursts_alone(seconds: float, bursts: bool) -> None:
    one = loop(num_scheduler_steps="auto")
    costs = StepCosts(one.scheduler.table, {key: seconds for key in one.scheduler.table.bursts()})
    one.scheduler.predictor.costs = costs
    one.add([1], max_tokens=40, ignore_eos=True)
    one.drain(1)
    assert (one.device.bursts > 0) is bursts


@pytest.mark.parametrize("params", [{"logprobs": 1}, {"presence_penalty": 1.0}, {"logit_bias": {3: 1.0}}])
def test_a_row_that_needs_the_host_or_the_full_sampler_keeps_steps_single(params: dict[str, Any]) -> None:
    one = loop()
    one.add([1], max_tokens=30, ignore_eos=True)
    one.add([2], max_tokens=20, ignore_eos=True, **params)
    for _ in range(15):
        one.step(1)
    assert one.device.bursts == 0
    one.drain(1)
    assert one.device.bursts == 1


def test_steps_are_single_where_pages_run_out() -> None:
    """No sequence is preempted for a burst."""
    one = loop(num_pages=1 + 30, max_num_seqs=2)
    for seed in range(2):
        one.add([seed], max_tokens=58, ignore_eos=True)
    one.drain(1)
    assert one.device.bursts > 3 and one.exhausted and one.scheduler.registry.num_preemptions == 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_preempted_with_tokens_of_bursts_in_flight(ahead: int) -> None:
    one = loop(num_pages=1 + 30)
    for seed in range(9):
        one.add([seed, seed], max_tokens=50 + seed, ignore_eos=seed % 2 == 0)
        one.step(ahead)
    one.drain(ahead)
    assert one.device.bursts > 5 and one.scheduler.registry.num_preemptions > 0


@pytest.mark.parametrize("steps", range(5))
def test_aborts_between_bursts(steps: int) -> None:
    one = loop()
    sequences = [one.add([seed], max_tokens=60, ignore_eos=True) for seed in range(3)]
    for _ in range(steps):
        one.step(2)
    one.abort(sequences[1])
    one.step(2)
    one.stop_at_string(sequences[2])
    one.drain(2)
    assert sequences[0].finish_reason == "length"


def test_a_burst_waits_for_its_program() -> None:
    one = loop()
    one.begin_with_few()
    sequence = one.add([1], max_tokens=60, ignore_eos=True)
    for _ in range(20):
        one.step(1)
    assert one.device.bursts == 0 and len(sequence.output_token_ids) == 19
    one.get_more(1000)
    one.drain(1)
    assert one.device.bursts > 1


def test_costs_are_learned_and_saved() -> None:
    one = loop()
    costs, table = one.scheduler.predictor.costs, one.scheduler.table
    key = table.bursts()[0]
    single = costs.seconds(key.trunk, key.sampler)
    assert costs.added_seconds(key) == pytest.approx(8 * single)
    for _ in range(40):
        costs.observe_burst(key, NO_WORK, 5 * single)
    assert costs.added_seconds(key) == pytest.approx(5 * single, rel=0.05)
    assert costs.seconds(key.trunk, key.sampler) == pytest.approx(single, rel=0.05)
    again = type(costs).from_json(costs.to_json())
    assert {*again.known} == {key} and isinstance(key, BurstKey)
