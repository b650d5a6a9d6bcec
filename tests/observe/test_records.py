"""The loop's records of its steps, on a virtual clock."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.insight.recording import step_recorder
from jengine.insight.recording.machine import GarbagePauses, garbage_pauses, memory
from jengine.insight.recording.records import STAGES, TOKENS, Memory, StepRecord, StepTotals
from jengine.insight.recording.step_recorder import StepRecorder
from tests.observe.virtual import MS, TILE, Load, Virtual, make_virtual


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Virtual:
    monkeypatch.setattr(step_recorder, "memory", lambda now: Memory(now, 1 << 30, 1 << 33))
    return make_virtual(monkeypatch, load=Load(away=0.3 * MS))


def test_stages_add_up(virtual: Virtual) -> None:
    for _ in range(8):
        virtual.ask(TILE, 50)
    trace = virtual.run()
    steps = trace.steps
    assert [step.number for step in steps] == list(range(len(steps)))
    steady = steps[10:-10]
    for step in steady:
        assert (
            step.rows == 8
            and step.padded_rows == 0
            and step.tiles == step.prompt_tokens == 0
            and not step.chunks
        )
        assert (step.schedule, step.pack, step.dispatch) == pytest.approx((0.5 * MS, 0.0, 0.2 * MS))
        assert (step.collect, step.text, step.away, step.mask) == pytest.approx(
            (0.2 * MS, 0.1 * MS, 0.3 * MS, 0.0)
        )
        assert step.waited and step.device == pytest.approx(step.predicted) == pytest.approx(10.26 * MS)
        assert step.cpu == pytest.approx(0.5 * MS)
        assert step.dispatched == pytest.approx(step.begun + 0.7 * MS)
        assert step.predicted_plan > 0 and step.predicted_collect > 0
        assert (step.running, step.waiting, step.strategy, step.reason) == (8, 0, "throughput", "")
    # a turn of the loop: this step's plan, the step before's end, and what follows
    for before, after in pairwise(steady):
        assert after.begun - before.begun == pytest.approx(before.seconds)
        assert after.dispatched < before.ended < after.ended, "steps overlap"


def test_prompts(virtual: Virtual) -> None:
    virtual.ask(5 * TILE + 10, 4)
    virtual.ask(TILE, 4)
    first, *_ = virtual.run().steps
    assert first.chunks == ((1, 0, TILE), (0, 0, 5 * TILE + 10)) and first.reason == "most tokens a second"
    assert (first.rows, first.tiles, first.prompt_tokens) == (0, 7, 6 * TILE + 10)
    assert first.padded_tokens(TILE) == first.trunk.tiles * TILE - first.prompt_tokens
    assert first.owned == 6 * 4 + 1 and first.free == 1000 - first.owned


def test_requests(virtual: Virtual) -> None:
    virtual.ask(TILE, 4)
    virtual.ask(TILE, 1000, at=0.02)
    while len(virtual.engine.records.requests) < 1:
        virtual.turn()
    ended, running = virtual.engine.trace().requests
    assert (ended.request_id, ended.output_tokens, ended.reason, ended.prompt_tokens) == (
        "r0",
        4,
        "length",
        TILE,
    )
    assert ended.arrival == 1000.0 < ended.scheduled < ended.first_token < ended.ended
    assert (running.request_id, running.ended, running.reason) == (
        "r1",
        0.0,
        "",
    ) and running.arrival == pytest.approx(1000.02)
    assert (ended.pages, running.pages) == (
        0,
        virtual.engine.scheduler.blocks.owned,
    ) and running.pages >= TILE // 16
    virtual.engine.end("r1", "abort", "cancelled")
    assert [request.reason for request in virtual.engine.trace().requests] == ["length", "abort"]


def test_a_pause_is_no_stage(virtual: Virtual) -> None:
    virtual.ask(TILE, 20)
    virtual.ask(TILE, 20, at=60.0)
    steps = virtual.run().steps
    assert sum(step.seconds for step in steps) < 1.0 and steps[-1].ended - steps[0].begun > 60.0
    [last] = [step for step, after in pairwise(steps) if after.begun - step.ended > 1.0]
    assert last.text == pytest.approx(0.1 * MS) and last.away == 0.0


def test_rings_are_bounded(virtual: Virtual) -> None:
    virtual.engine.records = StepRecorder(virtual.engine.scheduler, overlap=True, steps=16, requests=3)
    for _ in range(8):
        virtual.ask(TILE, 50)
    trace = virtual.run()
    assert len(trace.steps) == 16 and len(trace.requests) == 3 and trace.steps[-1].number == 49
    assert sum(virtual.engine.records.totals().steps.values()) == 50, "also those that the ring has lost"
    last = virtual.engine.trace(seconds=0.045)
    assert 3 <= len(last.steps) <= 5 and last.steps[-1].number == trace.steps[-1].number


def test_totals(virtual: Virtual) -> None:
    """Each step counts once, whether totals are read once or often, and however small the ring is."""
    records = virtual.engine.records
    for _ in range(8):
        virtual.ask(TILE, 50)
    virtual.each_step = lambda: records.totals()  # type: ignore[func-returns-value]
    trace = virtual.run()
    totals = records.totals()
    again = StepTotals().plus(trace.steps, TILE)
    assert totals.steps == again.steps and sum(totals.steps.values()) == len(trace.steps)
    assert totals.seconds == pytest.approx(again.seconds) and {*totals.seconds} == {*STAGES}
    assert totals.rows == 8 * 49 and totals.prompt_tokens == 8 * TILE and totals.padded_tokens == 0
    assert totals.tokens == again.tokens and sum(totals.tokens) == len(trace.steps)
    assert totals.device_seconds == pytest.approx(totals.predicted_seconds)
    assert totals.resident == 1 << 30 and len(totals.pauses) == 3


def test_totals_wait_for_a_step_that_is_read_meanwhile(virtual: Virtual) -> None:
    virtual.ask(TILE, 3)
    first, second, *_ = virtual.run().steps
    records = StepRecorder(virtual.engine.scheduler, overlap=True)

    class Ring(deque[StepRecord]):
        def __iter__(self) -> Iterator[StepRecord]:
            if len(self) == 1:
                records.read(second, 0.0, 0.0, 0.0, waited=False, device=0.0)
            return super().__iter__()

    records.steps = Ring()
    records.read(first, 0.0, 0.0, 0.0, waited=False, device=0.0)
    records.turn(1.0)
    assert sum(records.totals().steps.values()) == 1
    records.turn(2.0)
    assert sum(records.totals().steps.values()) == 2


counts = st.integers(0, 1000)


@given(
    *[
        st.builds(
            StepTotals,
            steps=st.dictionaries(st.sampled_from(["8+0", "8+1"]), counts),
            rows=counts,
            resident=counts,
        )
    ]
    * 2
)
def test_totals_of_several_engines(first: StepTotals, second: StepTotals) -> None:
    both = first + second
    assert both.rows == first.rows + second.rows and both.resident == second.resident
    assert both.steps == {
        name: first.steps.get(name, 0) + second.steps.get(name, 0) for name in first.steps | second.steps
    }
    assert both.tokens == (0,) * (len(TOKENS) + 1)


def test_pauses_of_the_garbage_collector() -> None:
    own = GarbagePauses()
    gc.callbacks.append(own)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(own)
    count, seconds = own.by_generation[2]
    assert count == 1 and own.seconds == seconds > 0.0
    pauses = garbage_pauses()
    assert pauses is garbage_pauses() and gc.callbacks.count(pauses) == 1
    before = pauses.by_generation[2]
    gc.collect()
    assert pauses.by_generation[2] > before


def test_memory() -> None:
    now = memory(5.0)
    assert now.at == 5.0 and 1 << 20 < now.resident < 1 << 42
