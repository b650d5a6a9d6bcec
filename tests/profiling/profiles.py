"""Artificial profiles, and one of an engine on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from jengine.insight.profiling.data import ProcessProfile
from jengine.insight.recording import step_recorder
from jengine.insight.recording.records import Memory
from tests.observe.virtual import TILE, Load, Virtual, make_virtual

BEGIN, SECONDS = 1000.0, 10.0


def process(**fields: Any) -> ProcessProfile:
    """Ten seconds of a process whose loop is in the thread "loop"."""
    end = BEGIN + SECONDS
    plain = {
        "name": "engine",
        "pid": 7,
        "command": "serve",
        "begun": BEGIN,
        "ended": end,
        "samples": 1000,
    }
    return ProcessProfile(**{**plain, "important": ["loop", "MainThread"], **fields})


def stepping(monkeypatch: pytest.MonkeyPatch, late: float = 0.0, load: Load | None = None) -> Virtual:
    """An engine that has run 200 steps of 10 ms from BEGIN on; planning the 100th took `late` seconds
    longer.
    """
    monkeypatch.setattr(step_recorder, "memory", lambda now: Memory(now, 1 << 30, 1 << 33))
    virtual = make_virtual(monkeypatch, load=load)
    for _ in range(8):
        virtual.ask(TILE, 200)
    while virtual.engine.has_work or virtual.arrivals:
        if len(virtual.engine.records.steps) == 100:
            virtual.load.schedule += late
        virtual.turn()
        if len(virtual.engine.records.steps) == 101:
            virtual.load.schedule = 0.5e-3
    return virtual
