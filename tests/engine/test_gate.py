"""When a paused or sleeping engine plans steps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from jengine.engine.loop.engine import Engine
from jengine.engine.loop.turns import Gate
from jengine.scheduling.requests.loras import LoraPlaces


def engine(**changes: Any) -> Any:
    """An engine without requests that is paused in mode "wait"."""
    gate = Gate(LoraPlaces())
    gate.mode = "wait"
    searches = SimpleNamespace(awaited=False)
    parts: dict[str, Any] = {
        "_first_use": None,
        "_programs": None,
        "_early": [],
        "_in_flight": deque(),
        "_read_all_but": lambda count: [],
        "_clock": SimpleNamespace(planning=lambda now, costs: None),
        "gate": gate,
        "pages": None,
        "scheduler": SimpleNamespace(
            has_work=False, searches=searches, speculation=searches, predictor=SimpleNamespace(costs=None)
        ),
        **changes,
    }
    made = type("Stub", (), {name: vars(Engine)[name] for name in ("has_work", "has_unused_programs")})()
    made.__dict__.update(parts)
    type(made).has_steps = vars(Engine)["has_steps"]
    return made


class Planned(Exception):
    """A step was planned."""


def test_pages_are_saved_before_a_pause_begins() -> None:
    def turn(now: float) -> None:
        raise Planned

    one = engine(pages=SimpleNamespace(saving=True), records=SimpleNamespace(turn=turn))
    assert one.has_work
    with pytest.raises(Planned):
        next(Engine.turn(one))
    one.pages.saving = False
    assert not one.has_work and next(Engine.turn(one, waits=False)) is None


def test_nothing_runs_asleep() -> None:
    ran: list[Any] = []
    one = engine(_first_use=SimpleNamespace(left=True, run_next=lambda **state: ran.append(state)))
    assert not one.has_work, "an engine that is closed would run them all"
    assert one.has_unused_programs and next(Engine.turn(one, waits=False)) is None and len(ran) == 1
    one.gate.asleep = {"weights", "kv_cache"}
    assert not one.has_unused_programs and next(Engine.turn(one, waits=False)) is None and len(ran) == 1
