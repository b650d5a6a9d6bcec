"""Each rule reports its problem, and nothing for a healthy process."""

from __future__ import annotations

from typing import Any

import pytest

from jengine.insight.profiling.data import (
    CallCount,
    Flame,
    HeapGrowth,
    InterpreterWait,
    LockWait,
    ProcessProfile,
    Profile,
    SlowCall,
)
from jengine.insight.profiling.device_trace import DeviceGap, DeviceTimes
from jengine.insight.profiling.report import findings
from jengine.insight.profiling.slow_steps import events, slow_steps, turns
from jengine.insight.recording.records import Pause
from tests.observe.virtual import Load
from tests.profiling.profiles import BEGIN, process, stepping

STORM = [Pause(BEGIN + i / 2, 0.05, 2, 0, "storm") for i in range(20)]
LOG = [
    CallCount("loop", "write", 20_000, 0.4, "log (app.py:3)"),
    CallCount("loop", "fsync", 500, 0.7),
    CallCount("loop", "futex", 9000, 8.0),
]
HELD = [
    LockWait(BEGIN + i, 0.06, "loop", "self._lock", "step (app.py:9)", "holder, in hold (app.py:20)")
    for i in range(10)
]
BUSY = [InterpreterWait(BEGIN + i / 100, 0.004, "cruncher") for i in range(900)]
LEAK = [HeapGrowth("app.py:5", 50 << 20, 1000)]


def named(**fields: Any) -> list[str]:
    return [finding.name for _, finding in findings(Profile(target="demo", processes=[process(**fields)]))]


@pytest.mark.parametrize(
    "name, fields, words",
    [
        ("garbage_collection", {"collections": STORM}, ["10%", "50 ms", "storm"]),
        (
            "system_calls",
            {"calls": LOG},
            ["thread loop", "fsync", "log (app.py:3)", "2,050 a second"],
        ),
        ("lock", {"lock_waits": HELD}, ["self._lock", "holder, in hold (app.py:20)", "step (app.py:9)"]),
        (
            "interpreter_lock",
            {"interpreter_waits": BUSY, "flames": [Flame("cruncher", {"run (a.py:1);sum (a.py:2)": 9})]},
            ["cruncher", "a.py:2"],
        ),
        ("heap_growth", {"growth": LEAK, "heap_seconds": 5.0}, ["600 MiB a minute", "app.py:5"]),
        (
            "device_idle",
            {
                "device_times": [
                    DeviceTimes("GPU:0", 2.0, 1.2, 0.2, 0.1, 0.5, 900, [DeviceGap("add", "dot", 100, 0.4)])
                ]
            },
            ["GPU:0", "30%", "until the host starts the next program", "400 ms in 100 gaps"],
        ),
    ],
)
def test_what_is_provoked_is_named_alone(name: str, fields: dict[str, Any], words: list[str]) -> None:
    [(_, finding)] = findings(Profile(target="demo", processes=[process(**fields)]))
    assert finding.name == name and 0.0 < finding.share <= 1.0
    assert all(word in str(finding) for word in words), finding


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"collections": [Pause(BEGIN + 1, 0.02, 2, 100, "loop")]},
        {
            "calls": [
                CallCount("loop", "futex", 10**6, 9.0),
                CallCount("loop", "sendto", 9000, 0.9),
                CallCount("loop", "write", 5000, 0.1),
            ]
        },
        # requests do not wait for that thread, and it does less than a tenth
        {"calls": [CallCount("log", "write", 20_000, 0.9)]},
        {"lock_waits": HELD[:3]},
        {"lock_waits": [LockWait(wait.at, 1.0, "writer", wait.lock, wait.where) for wait in HELD]},
        # requests wait for what it does
        {"interpreter_waits": [InterpreterWait(wait.at, wait.seconds, "loop") for wait in BUSY]},
        {"interpreter_waits": [InterpreterWait(wait.at, wait.seconds) for wait in BUSY]},
        {"growth": [HeapGrowth("app.py:5", 1 << 20, 10)], "heap_seconds": 5.0},
        {"growth": LEAK},
    ],
)
def test_silent_when_healthy(fields: dict[str, Any]) -> None:
    assert named(**fields) == []


def test_a_storm_is_no_matter_of_the_interpreters_lock() -> None:
    """Waiting while another thread collects garbage is attributed to the collector."""
    long = [Pause(BEGIN + i / 2, 0.1, 2, 0, "storm") for i in range(20)]
    waits = [InterpreterWait(one.begun + 0.001, 0.09, "storm") for one in long]
    assert named(collections=long, interpreter_waits=waits) == ["garbage_collection"]


def test_what_costs_most_comes_first() -> None:
    assert named(collections=STORM, lock_waits=[*HELD, *HELD, *HELD], calls=LOG) == [
        "lock",
        "system_calls",
        "garbage_collection",
    ]


def with_steps(
    monkeypatch: pytest.MonkeyPatch, late: float, load: Load | None = None, **fields: Any
) -> ProcessProfile:
    virtual = stepping(monkeypatch, late, load)
    end = virtual.clock.now
    trace = virtual.engine.trace().to_json()
    return process(**{"trace": trace, "ended": end, **fields})


def test_turns_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = with_steps(monkeypatch, 0.0)
    trace = profile.steps
    assert trace is not None and len(trace.steps) == 200
    found = [*turns(trace.steps)]
    assert sum(turn.seconds for turn in found) == pytest.approx(
        profile.ended - trace.steps[0].begun, rel=0.01
    )
    assert slow_steps(profile) == []


@pytest.mark.parametrize(
    "kind, make",
    [
        ("garbage_collection", lambda at: {"collections": [Pause(at, 0.2, 2, 5, "storm")]}),
        ("system_calls", lambda at: {"slow_calls": [SlowCall(at, 0.2, "loop", "fsync", "log (app.py:3)")]}),
        (
            "lock",
            lambda at: {
                "lock_waits": [
                    LockWait(at, 0.2, "loop", "lock", "step (app.py:9)", "holder, in hold (app.py:20)")
                ]
            },
        ),
        ("interpreter_lock", lambda at: {"interpreter_waits": [InterpreterWait(at, 0.2, "cruncher")]}),
    ],
)
def test_a_slow_step_shows_what_it_waited_for(monkeypatch: pytest.MonkeyPatch, kind: str, make: Any) -> None:
    profile = with_steps(monkeypatch, 0.2)
    [slow] = slow_steps(profile)
    assert slow.causes == () and str(slow).endswith(": no measurement explains it; of which 201 ms schedule")
    assert slow.turn.seconds == pytest.approx(0.2 + slow.usual, abs=0.01)
    profile = with_steps(monkeypatch, 0.2, **make(slow.turn.begin))
    [slow] = slow_steps(profile)
    [(event, seconds)] = slow.causes
    assert event.kind == kind and seconds == pytest.approx(0.2) and event.text in str(slow)
    elsewhere = with_steps(monkeypatch, 0.2, **make(slow.turn.end + 0.01))
    assert slow_steps(elsewhere)[0].causes == () and len(events(elsewhere)) == 1


def test_what_explain_finds_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = with_steps(monkeypatch, 0.0, load=Load(slower=1.6))
    [(found, finding)] = findings(Profile(target="demo", processes=[process(), profile]))
    assert found is profile and finding.name == "busy_machine" and "times as long as usual" in finding.summary


def test_seconds_of_a_slow_step_that_no_stage_has(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = with_steps(monkeypatch, 0.2)
    trace = profile.steps
    assert trace is not None
    for step in trace.steps:
        step.schedule = min(step.schedule, 0.1)
    profile.trace = trace.to_json()
    [slow] = slow_steps(profile)
    assert "; of which 100 ms schedule; 101 ms not accounted for" in str(slow)
