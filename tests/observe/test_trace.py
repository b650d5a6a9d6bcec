"""Traces are saved in Perfetto's format, and can be loaded again."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jengine import InvalidArgument
from jengine.insight.recording import step_recorder
from jengine.insight.recording.perfetto import LANES, trace_events
from jengine.insight.recording.records import Memory, Pause
from jengine.insight.recording.trace import Trace
from tests.observe.virtual import MS, TILE, Load, make_virtual

Event = dict[str, Any]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A trace with all features: chunked prompts together with rows, preemptions, a pause, a waiting
    request.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(step_recorder, "memory", lambda now: Memory(now, 1 << 30, 1 << 33))
        virtual = make_virtual(monkeypatch, pages=60, load=Load(away=0.1 * MS))
        for i in range(12):
            virtual.ask(TILE + 37 * i, 100, at=0.01 * i)
        while len(virtual.engine.records.requests) < 6:
            virtual.turn()
        trace = virtual.engine.trace()
        trace.pauses.append(Pause(trace.steps[3].begun, 2 * MS, 2, 1000))
        return trace


@pytest.fixture(scope="module")
def saved(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("trace") / "trace.json"
    trace.save(file)
    return file


@pytest.fixture(scope="module")
def events(saved: Path) -> list[Event]:
    whole = json.loads(saved.read_text())
    assert whole["displayTimeUnit"] == "ms"
    found: list[Event] = whole["traceEvents"]
    return found


def test_read_back(trace: Trace, saved: Path) -> None:
    assert Trace.load(saved) == trace == Trace.from_json(trace.to_json())
    assert repr(trace) == repr(Trace.load(saved)) and "steps in" in repr(trace)
    assert Trace.load(saved).step_costs.to_json() == bytes(trace.costs)


def test_the_last_seconds(trace: Trace) -> None:
    for first in (1, 4, len(trace.steps) // 2, len(trace.steps) - 1):
        since = (trace.steps[first - 1].ended + trace.steps[first].ended) / 2
        assert trace.last(trace.taken - since).steps == trace.steps[first:]
    [pause] = trace.pauses
    assert (
        trace.last(trace.taken - pause.begun + 1e-6).pauses
        and not trace.last(trace.taken - pause.begun - 1e-6).pauses
    )
    ended = sorted(request.ended for request in trace.requests if request.ended)
    since = (ended[1] + ended[2]) / 2
    assert len(trace.last(trace.taken - since).requests) == len(trace.requests) - 2
    last = trace.last(0.2)
    assert {r.request_id for r in trace.requests if not r.ended} <= {r.request_id for r in last.requests}
    assert not last.pauses and last.memories == trace.memories


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", "{}", '{"traceEvents": []}', '{"jengine": {"steps": 3}}']
)
def test_what_is_no_trace(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"^(trace|path)="):
        Trace.load(file)


def test_files_that_there_are_not(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        Trace.load(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="cannot be written: No such file"):
        trace.save(tmp_path / "missing" / "trace.json")


def test_the_format(events: list[Event]) -> None:
    """The events follow the description of the format."""
    for event in events:
        assert event["ph"] in "XCiM" and isinstance(event["name"], str) and event["pid"] in (1, 2), event
        if event["ph"] != "M":
            assert event["ts"] >= 0.0
        if event["ph"] == "X":
            assert event["dur"] >= 0.0 and event["tid"] > 0 and isinstance(event["args"], dict)
        if event["ph"] == "C":
            assert event["args"] and all(
                isinstance(value, int | float) and value >= 0 for value in event["args"].values()
            )
        if event["ph"] == "i":
            assert event["s"] in "gpt"
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    assert used <= {*names} and {name for (pid, tid), name in names.items() if pid == 1 and tid} == {*LANES}


def test_slices_nest(events: list[Event]) -> None:
    """Slices of a lane follow each other, or lie within each other: Perfetto drops others."""
    lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        lanes[event["pid"], event["tid"]].append(event)
    assert len(lanes) > 12
    for slices in lanes.values():
        open_until: list[float] = []
        for event in slices:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.002, event
            open_until.append(end)


def test_what_is_shown(trace: Trace, events: list[Event]) -> None:
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event)
    steps = trace.steps
    device = [event for event in events if event["ph"] == "X" and event["tid"] == 9 and event["pid"] == 1]
    assert [event["args"]["step"] for event in device] == [step.number for step in steps]
    assert {event["args"]["program"] for event in device} == {step.name for step in steps}
    assert len(by_name["schedule"]) == len(by_name["dispatch"]) == len(by_name["wait"]) == len(steps)
    assert (
        sum(event["args"]["count"] for event in by_name["preemption"])
        == steps[-1].preemptions - steps[0].preemptions
        > 0
    )
    resumed = {
        kind: sum(event["args"]["count"] for event in by_name[f"resumption ({kind})"])
        for kind in ("cached", "swap", "recompute")
    }
    assert tuple(resumed.values()) == steps[-1].resumptions and resumed["recompute"] > 0, (
        "without a prefix cache nothing else is possible"
    )
    chunks = [
        event for event in events if event["ph"] == "X" and event["pid"] == 2 and "position" in event["args"]
    ]
    assert len(chunks) == sum(len(step.chunks) for step in steps)
    lanes = {event["tid"] for event in events if event["ph"] == "X" and event["pid"] == 2}
    assert len(lanes) == len(trace.requests) == 12
    assert len(by_name["queue"]) >= 6 and len(by_name["prefill"]) >= 6 and len(by_name["decode"]) >= 6
    assert by_name["generation 2"][0]["args"]["collected"] == 1000
    last = [event for event in by_name["pages"] if event["ph"] == "C"][-1]["args"]
    assert sum(last.values()) == 60


def test_pages_of_the_host_tier(trace: Trace) -> None:
    """Spills and fetches are counted for each step; an engine without a tier has no such counter."""
    before = trace.steps[0]
    after = msgspec.structs.replace(before, number=1, spills=before.spills + 3, fetches=before.fetches + 2)
    counters = [
        event["args"]
        for event in trace_events([before, after], [], [], TILE)
        if event["name"] == "pages moved"
    ]
    assert counters == [{"to_host": 3, "from_host": 2}]
