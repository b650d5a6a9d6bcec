"""A report that fails costs a figure, never a step."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jengine.scheduling.forecasts import expectations
from tests.observe.virtual import Virtual, make_virtual


def broken(*_: Any) -> Any:
    raise ZeroDivisionError("planted")


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Virtual:
    virtual = make_virtual(monkeypatch)
    for _ in range(20):
        virtual.ask(5, 5)
    return virtual


def test_a_prediction_that_fails_is_missing(
    virtual: Virtual, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = virtual.engine
    assert engine.load.first_token_seconds is not None
    virtual.turn()
    monkeypatch.setattr(expectations, "Forecast", broken)
    for _ in range(5):
        load = engine.load
        assert load.first_token_seconds is None and load.running == 8 and load.waiting == 12
    assert load.report_faults == 1, "it is tried again a while later, not in each turn of the loop"
    for _ in range(3):
        engine._outlook._until = 0.0
        load = engine.load
    assert load.report_faults == 4
    [logged] = caplog.records
    assert (
        logged.levelno == logging.WARNING
        and "first_token_seconds" in logged.message
        and "planted" in (logged.exc_text or "")
    )
    monkeypatch.undo()


def test_totals_and_traces_that_fail_are_old_or_empty(
    virtual: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = virtual.engine
    virtual.turn()
    virtual.turn()
    totals = engine.totals()
    monkeypatch.setattr(engine.records, "totals", broken)
    monkeypatch.setattr(engine.records, "trace", broken)
    assert engine.totals() == totals
    assert engine.trace().steps == [] and engine.trace().facts.max_num_seqs == 8
    assert engine.load.report_faults == 3


def test_requests_end_although_they_cannot_be_recorded(
    virtual: Virtual, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def ended(self, sequence: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(virtual.engine, "_recorder", Full())
    trace = virtual.run()
    assert [request.reason for request in trace.requests] == ["length"] * 20
    assert virtual.engine.load.report_faults == 20
