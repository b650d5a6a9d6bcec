"""Pipelines: which sequences have rows in a step, while several steps are in flight."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest

from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.rows import Timeline
from jengine.scheduling.step_plan import NO_WORK, Work
from jengine.table.program_table import ProgramTable, SamplerKey, TrunkKey
from tests.scheduling.strict_device import Loop


def make_loop(stages: int, *, through_host: bool = False, costs: StepCosts | None = None) -> Loop:
    return Loop(
        max_model_len=64,
        tile_size=4,
        page_size=4,
        num_pages=400,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        stages=stages,
        through_host=through_host,
        costs=costs,
    )


def decode_steps(loop: Loop, count: int) -> list[list[int]]:
    """The sequences with a row in each of the next steps."""
    found = []
    for _ in range(count):
        assert loop.step(loop.scheduler.cohorts.stages)
        found.append([span.seq for span in loop.last.spans[: len(loop.last.spans) - loop.last.prompts]])
    return found


@pytest.mark.parametrize("stages", [2, 4])
def test_each_sequence_has_a_row_in_every_step_of_its_cohort(stages: int) -> None:
    loop = make_loop(stages)
    for i in range(8):
        loop.add([i % 7] * 6, max_tokens=40, ignore_eos=True)
    for _ in range(4 * stages):  # prompts, and a few more
        loop.step(stages)
    steps = decode_steps(loop, 3 * stages)
    assert {len(step) for step in steps} == {8 // stages}
    assert steps[:stages] == steps[stages : 2 * stages] == steps[2 * stages :]
    assert sorted(chain(*steps[:stages])) == [*range(8)]
    # a step reads only what the oldest step in flight samples, so as many run at once as there are stages
    assert loop.last.overtakes == stages - 1
    loop.drain(stages)


def test_tokens_that_come_through_the_host_are_known_when_a_step_is_planned() -> None:
    """There is one cohort more than stages, whose tokens the host reads meanwhile."""
    loop = make_loop(2, through_host=True)
    for i in range(9):
        loop.add([i % 7] * 6, max_tokens=40, ignore_eos=True)
    for _ in range(12):
        loop.step(2)
    steps = decode_steps(loop, 9)
    assert {len(step) for step in steps} == {3} and steps[:3] == steps[3:6] == steps[6:]
    assert all(span.known >= 0 for span in loop.last.spans) and len(loop.dispatched) == 2
    loop.drain(2)


def test_cohorts_stay_equal_when_sequences_end() -> None:
    loop = make_loop(2)
    for i in range(8):  # those that arrive first end soon
        loop.add([i % 7] * 6, max_tokens=8 if i < 4 else 50, ignore_eos=True)
    while loop.scheduler.registry.num_running != 4 or loop.scheduler.registry.waiting:
        loop.step(2)
    decode_steps(loop, 4)
    steps = decode_steps(loop, 8)
    assert {len(step) for step in steps} == {2}
    assert {*Counter(chain(*steps)).values()} == {4}, "one has waited longer than the others"
    loop.drain(2)


def test_a_lone_sequence_runs_step_by_step_one_ahead_of_the_host() -> None:
    loop = make_loop(4)
    loop.add([1, 2, 3], max_tokens=20, ignore_eos=True)
    for _ in range(12):
        loop.step(4)
        assert loop.last.overtakes == 0 and len(loop.dispatched) <= 2
    loop.drain(4)


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    loop = make_loop(4)
    loop.add([1] * 32, max_tokens=2)  # eight tiles
    for _ in range(4):
        assert loop.step(4)
    assert len(loop.dispatched) == 4, "chunks need no earlier samples"
    assert [plan.trunk.tiles for plan, *_ in loop.dispatched] == [2, 2, 1, 1]
    loop.drain(4)


def test_the_timeline_of_a_pipeline_predicts_when_steps_end() -> None:
    timeline = Timeline(stages=4)
    assert timeline.plan(10.0, 1.0) == 14.0  # it passes four stages
    assert timeline.start(10.0) == 11.0, "the first stage is free before that"
    assert [timeline.plan(10.0, 1.0) for _ in range(3)] == [15.0, 16.0, 17.0]
    timeline.collect(15.0)  # a second late
    assert timeline.start(15.0) == 15.0 and timeline.plan(15.0, 1.0) == 19.0


def test_as_many_sequences_run_as_fill_the_best_step_of_each_cohort() -> None:
    """A step of sixteen rows would take far longer than two of eight."""

    class Steep(StepCosts):
        def seconds(self, trunk: TrunkKey, sampler: SamplerKey | None = None, work: Work = NO_WORK) -> float:
            return 1e-3 if trunk.rows <= 8 else 1.0

    running = {}
    for stages in (1, 2):
        loop = make_loop(stages, costs=Steep(ProgramTable((1,), (1,), (1,), 1)))
        for i in range(16):
            loop.add([i % 7] * 6, max_tokens=30, ignore_eos=True)
        for _ in range(16):
            loop.step(stages)
        running[stages] = loop.scheduler.registry.num_running
        loop.drain(stages)
    assert running == {1: 8, 2: 16}
