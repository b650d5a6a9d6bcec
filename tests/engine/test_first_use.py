"""Programs that arrive run twice before steps use them: at once if the engine is idle, else now and then."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.engine.loop import engine_parts as module
from jengine.engine.loop.engine_parts import RUNS, SHARE, FirstUse
from jengine.execution.kinds import Key
from jengine.execution.programs import first_keys, program_keys
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import ProgramTable
from tests.execution.specs import make_spec

SPEC = dataclasses.replace(
    make_spec(),
    table=ProgramTable.build(max_num_seqs=16, max_num_batched_tokens=160, tile_size=32, pooling=True),
)
FIRST, EVERY = first_keys(SPEC), program_keys(SPEC)


class Arrived:
    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys

    @property
    def ready(self) -> int:
        return len(self.keys)

    def usable(self) -> list[Key]:
        return [*self.keys]

    wait = prefer = stop = None


class Loop:
    """A loop's clock, and a runner whose runs take a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, list[Key]()
        self.spec: Any = SPEC
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def run_example(self, key: Key, example: Any, *, times: int) -> set[Key]:
        assert times == RUNS
        self.now += times
        self.ran.append(key)
        return {key, example.trunk, example.sampler} if isinstance(example, StepPlan) else {key}


def test_an_idle_engine_uses_all_that_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, loop = Arrived([*FIRST]), Loop(monkeypatch)
    uses = FirstUse(arrived, loop, FIRST)  # type: ignore[arg-type]
    assert not uses.left and uses.ready == len(FIRST)
    others = [key for key in EVERY if key not in FIRST]
    arrived.keys += others
    ready = [uses.ready]
    while uses.left:
        uses.run_next(busy=False, in_flight=False)
        ready.append(uses.ready)
    assert ready == sorted(ready) and {*uses.usable()} == {*EVERY} and uses.ready == len(EVERY)
    assert {*loop.ran} <= {*others} and len(loop.ran) == len({*loop.ran}), "each once, and no other"


@given(order=st.permutations(EVERY), data=st.data())
@settings(max_examples=25)
def test_programs_may_arrive_in_any_order(order: list[Key], data: st.DataObject) -> None:
    """One that its steps' other programs do not accompany waits for them."""
    with pytest.MonkeyPatch.context() as patch:
        arrived, loop = Arrived([*FIRST]), Loop(patch)
        uses = FirstUse(arrived, loop, FIRST)  # type: ignore[arg-type]
        for key in order:
            arrived.keys += [key] * (key not in arrived.keys)
            for _ in range(data.draw(st.integers(0, 2))):
                uses.run_next(busy=False, in_flight=False)
        while uses.left:
            uses.run_next(busy=False, in_flight=False)
    assert {*uses.usable()} == {*EVERY} == {*loop.ran, *FIRST} | {*uses.usable()}


def test_while_requests_run_it_takes_a_bounded_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, loop = Arrived([*EVERY]), Loop(monkeypatch)
    uses = FirstUse(arrived, loop, FIRST)  # type: ignore[arg-type]
    steps = 0
    while uses.left:
        uses.run_next(busy=True, in_flight=True)
        loop.now += 0.5  # a step
        steps += 1
    assert len(loop.ran) > 1 and RUNS * (len(loop.ran) - 1) * SHARE <= 0.5 * steps


def test_in_a_pipeline_it_waits_until_no_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    uses = FirstUse(Arrived([*EVERY]), loop, FIRST)  # type: ignore[arg-type]
    assert uses.left
    loop.spec = SimpleNamespace(stages=(SPEC, SPEC))
    uses.run_next(busy=True, in_flight=True)
    assert not loop.ran
    uses.run_next(busy=True, in_flight=False)
    assert len(loop.ran) == 1
