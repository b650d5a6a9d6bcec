"""A profile as one self-contained HTML page: first the findings in words, then the data."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from jengine.insight.explanations.explain import explain
from jengine.insight.explanations.finding import duration, percent
from jengine.insight.profiling.data import Flame, ProcessProfile, Profile
from jengine.insight.profiling.findings import findings
from jengine.insight.profiling.slow_steps import Event, SlowStep, events, slow_steps, turns
from jengine.insight.recording.perfetto import stage_begins
from jengine.insight.recording.records import STAGES

FLAMES = 12  # number of threads with a flame graph
KINDS = {
    "garbage_collection": "garbage collection",
    "lock": "waiting for locks",
    "system_calls": "system calls",
    "interpreter_lock": "interpreter lock",
}
COLUMNS = 1000  # maximum number of bars of a lane, which is about its width in pixels
LEAST = 0.005  # minimum share of samples for which a frame is drawn


class Bar(NamedTuple):
    """An event of a lane, in seconds."""

    at: float
    seconds: float
    kind: str
    title: str


class Lane(NamedTuple):
    """Bars on a time axis; those of a tall lane are as high as they are long."""

    name: str
    bars: list[Bar]
    tall: bool = False


class Chart(NamedTuple):
    """Lanes on a common time axis."""

    begin: float
    end: float
    lanes: list[Lane]


class Frame:
    """A frame of a flame graph, with those that it called by name."""

    def __init__(self) -> None:
        self.count, self.called = 0, defaultdict[str, Frame](Frame)


def report_html(profile: Profile, jax: str = "") -> str:
    """The page. jax: the file in its folder with jax.profiler's capture; empty if there is none."""
    when = datetime.fromtimestamp(profile.processes[0].unix).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    return _template().render(profile=profile, when=when, jax=jax, findings=findings(profile))


def summary(profile: Profile) -> str:
    """The findings as text, for a terminal."""
    pairs = findings(profile)
    if not pairs:
        return "No findings: none of the measurements shows a delay."
    return "\n\n".join(f"{process.name}: {finding}" for process, finding in pairs)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tools = (explain, time_line, slow_steps, slow_step_chart, visible, flame, shade, lock_waits)
    environment.globals |= {tool.__name__: tool for tool in tools} | {"FLAMES": FLAMES, "LEAST": LEAST}
    environment.filters |= {"duration": duration, "percent": percent, "mib": lambda size: size / (1 << 20)}
    return environment.get_template("report.html")


def time_line(profile: ProcessProfile) -> Chart:
    """The loop's iterations, and what may have delayed them."""
    happened, trace = events(profile), profile.steps
    lanes = [
        Lane(name, [_bar(event) for event in happened if event.kind == kind]) for kind, name in KINDS.items()
    ]
    if trace is not None and trace.steps:
        steps = [
            Bar(t.begin, t.seconds, "step", f"step {t.step.number}, {t.step.name}: {duration(t.seconds)}")
            for t in turns(trace.steps)
        ]
        lanes.insert(0, Lane("iterations of the loop", steps, tall=True))
    return Chart(profile.begun, profile.ended, lanes)


def slow_step_chart(profile: ProcessProfile, slow: SlowStep) -> Chart:
    """The stages of the loop around a slow step, and what happened meanwhile."""
    margin, trace = 0.3 * slow.turn.seconds, profile.steps
    assert trace is not None
    stages = [
        Bar(
            at,
            getattr(step, stage),
            f"s{STAGES.index(stage) % 8}",
            f"{stage}: step {step.number}, {duration(getattr(step, stage))}",
        )
        for step in trace.steps
        for stage, at in stage_begins(step).items()
    ]
    bars = {name: [_bar(e) for e in events(profile) if e.kind == kind] for kind, name in KINDS.items()}
    begin, end = slow.turn.begin - margin, slow.turn.end + margin
    lanes = [Lane("stages of the loop", stages), *(Lane(name, others) for name, others in bars.items())]
    near = [lane for lane in lanes if any(b.at < end and b.at + b.seconds > begin for b in lane.bars)]
    return Chart(begin, end, near)


def _bar(event: Event) -> Bar:
    return Bar(
        event.at, event.seconds, event.kind, f"{KINDS[event.kind]}: {duration(event.seconds)} {event.text}"
    )


def visible(lane: Lane, chart: Chart) -> Iterator[dict[str, Any]]:
    """The longest bar of each column, in percent. Its opacity is the covered share of the column."""
    scale = 100 / max(chart.end - chart.begin, 1e-9)
    columns = defaultdict[int, list[Bar]](list)
    for bar in lane.bars:
        first, last = max(bar.at, chart.begin), min(bar.at + bar.seconds, chart.end)
        if bar.seconds and first <= last:
            columns[int((first - chart.begin) * scale * COLUMNS / 100)].append(bar)
    longest = max((bar.seconds for bars in columns.values() for bar in bars), default=1.0)
    for bars in columns.values():
        bar = max(bars, key=lambda bar: bar.seconds)
        first, last = max(bar.at, chart.begin), min(bar.at + bar.seconds, chart.end)
        covered = sum(bar.seconds for bar in bars) * scale * COLUMNS / 100
        yield {
            "bar": bar,
            "left": (first - chart.begin) * scale,
            "width": (last - first) * scale,
            "height": 100 * bar.seconds / longest if lane.tall else 100,
            "opacity": 1.0 if lane.tall else min(0.15 + covered, 1.0),
        }


def flame(graph: Flame) -> Frame:
    """The frames of a thread's samples, below a root."""
    root = Frame()
    for stack, count in graph.stacks.items():
        node = root
        node.count += count
        for name in stack.split(";"):
            node = node.called[name]
            node.count += count
    return root


def shade(frame: str) -> int:
    """One of eight shades, by file."""
    return zlib.crc32(frame.partition("(")[2].rpartition(":")[0].encode()) % 8


def lock_waits(profile: ProcessProfile) -> Iterable[tuple[tuple[str, ...], list[float]]]:
    """The seconds of waits, by thread, lock, place and holder."""
    waits = defaultdict[tuple[str, ...], list[float]](list)
    for wait in profile.lock_waits:
        waits[wait.thread, wait.lock, wait.where, wait.holder].append(wait.seconds)
    return sorted(waits.items())[:30]
