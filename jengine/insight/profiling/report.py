"""A profile as one self-contained HTML page: first the findings in words, then the data. Rules of `jengine
explain` take its step records.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from jengine.insight.explanations.explain import explain
from jengine.insight.explanations.finding import Finding, duration, percent
from jengine.insight.profiling.data import Flame, ProcessProfile, Profile
from jengine.insight.profiling.sampler import FILES
from jengine.insight.profiling.slow_steps import SlowStep, events, slow_steps, turns
from jengine.insight.recording.perfetto import stage_begins
from jengine.insight.recording.records import STAGES

COLLECTING, LONG_COLLECTION = 0.05, 0.1  # share of time; seconds
IN_CALLS, OTHERS_IN_CALLS = 0.05, 0.1  # shares of time, for threads that requests depend on, and for others
CALLS_A_SECOND = 5000.0
LOCKED, LONG_LOCK = 0.05, 0.1  # share of time; seconds
INTERPRETER = 0.1  # share of time for which a thread that wakes up waits
GROWTH = 200 << 20  # bytes a minute
DEVICE_IDLE = 0.2  # share of time
NO_REQUESTS = 0.05  # mean seconds of idle gaps above which there was no work
MIB = 1 << 20


def findings(profile: Profile) -> list[tuple[ProcessProfile, Finding]]:
    """All findings, the most expensive first."""
    pairs = [
        (process, finding)
        for process in profile.processes
        for finding in (*[rule(process) for rule in RULES], *_explained(process))
        if finding is not None
    ]
    return sorted(pairs, key=lambda pair: -pair[1].share)


def _explained(profile: ProcessProfile) -> list[Finding]:
    """Findings of `jengine explain` for that period's steps, unless this profile has its own rule."""
    trace = profile.steps
    names = {rule.__name__ for rule in RULES}
    return [] if trace is None else [f for f in explain(trace).findings if f.name not in names]


def garbage_collection(profile: ProcessProfile) -> Finding | None:
    """Garbage collections take much time, or a single one does."""
    listed = profile.collections
    longest = max([pause.seconds for pause in listed], default=0.0)
    share = sum(pause.seconds for pause in listed) / profile.seconds
    if share < COLLECTING and longest < LONG_COLLECTION:
        return None
    by_generation = sorted(Counter(collection.generation for collection in listed).items())
    counts = ", ".join(f"{count} of generation {generation}" for generation, count in by_generation)
    spent: dict[str, float] = defaultdict(float)
    for collection in listed:
        spent[collection.thread] += collection.seconds
    thread = max(spent, key=lambda name: spent[name], default="not known")
    return Finding(
        "garbage_collection",
        min(share, 1.0),
        f"Python's garbage collector stops the process {percent(share)} of the time",
        {
            "collections of 1 ms or more": counts,
            "the longest": duration(longest),
            "most of it in thread": thread,
            **_slow(profile, "garbage_collection"),
        },
        "gc.freeze(), gc.set_threshold(), or what makes so many objects",
        "call gc.freeze() once your objects are there; do not call gc.collect() while requests run",
        f"the process gets {percent(share)} of its time back, and no step is {duration(longest)} late",
    )


def system_calls(profile: ProcessProfile) -> Finding | None:
    """A thread spends its time in system calls on files, such as a log."""
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for call in profile.calls:
        if call.name in FILES:
            seconds[call.thread] += call.seconds
            counts[call.thread] += max(call.count, 0)

    def over(thread: str) -> float:
        limit = IN_CALLS if thread in profile.important else OTHERS_IN_CALLS
        return max(
            seconds[thread] / (limit * profile.seconds), counts[thread] / (CALLS_A_SECOND * profile.seconds)
        )

    worst = max(seconds, key=over, default="")
    if not worst or over(worst) < 1.0:
        return None
    share = seconds[worst] / profile.seconds
    calls = sorted(
        (call for call in profile.calls if call.thread == worst and call.name in FILES),
        key=lambda call: -call.seconds,
    )
    where = next((call.where for call in calls if call.where), "")
    known = f"{counts[worst] / profile.seconds:,.0f} a second" if counts[worst] else "not counted"
    return Finding(
        "system_calls",
        min(share, 1.0),
        f"thread {worst} spends {percent(share)} of its time in system calls to files, most of all"
        f" {calls[0].name}" + (f" in {where}" if where else ""),
        {
            "calls to files": known,
            **{
                call.name: (
                    f"{duration(call.seconds)} in all" + (f", {call.count} calls" if call.count >= 0 else "")
                )
                for call in calls[:3]
            },
            **_slow(profile, "system_calls"),
        },
        "what writes",
        "log less, or to a buffer; write and sync files in a process that requests do not depend on",
        f"the thread gets {percent(share)} of its time back",
    )


def lock(profile: ProcessProfile) -> Finding | None:
    """A thread that requests depend on waits for a lock held by another thread."""
    spent: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    holders: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for wait in profile.lock_waits:
        if wait.thread in profile.important:
            key = wait.thread, wait.lock, wait.where
            spent[key].append(wait.seconds)
            if wait.holder:
                holders[key][wait.holder] += 1
    worst = max(spent, key=lambda key: sum(spent[key]), default=None)
    if worst is None or (sum(spent[worst]) < LOCKED * profile.seconds and max(spent[worst]) < LONG_LOCK):
        return None
    thread, name, where = worst
    share = sum(spent[worst]) / profile.seconds
    by = [holder for holder, _ in holders[worst].most_common(1)]
    return Finding(
        "lock",
        min(share, 1.0),
        f"thread {thread} waits {percent(share)} of the time for the lock {name}"
        + (f", which thread {by[0].split(', in ')[0]} holds" if by else ""),
        {
            "waits in": where,
            "very likely held by": (
                by[0] if by else "unknown: no other thread was seen in a `with` block of that name"
            ),
            "waits of 10 ms or more": str(len(spent[worst])),
            "the longest": duration(max(spent[worst])),
            **_slow(profile, "lock"),
        },
        "the lock's holder",
        "hold it for less: do slow work, such as writing or computing, before or after",
        f"the thread gets {percent(share)} of its time back",
    )


def interpreter_lock(profile: ProcessProfile) -> Finding | None:
    """A thread computes in Python, and threads that requests depend on have to wait."""
    paused = [(pause.begun, pause.begun + pause.seconds) for pause in profile.collections]
    spent: dict[str, float] = defaultdict(float)
    for wait in profile.interpreter_waits:
        if (
            wait.holder
            and wait.holder not in profile.important
            and not any(a < wait.at + wait.seconds and wait.at < b for a, b in paused)
        ):
            spent[wait.holder] += wait.seconds
    holder = max(spent, key=lambda name: spent[name], default="")
    seconds = spent[holder]
    share = seconds / profile.seconds
    if share < INTERPRETER:
        return None
    each = duration(seconds / profile.samples)
    return Finding(
        "interpreter_lock",
        min(share, 1.0),
        f"thread {holder} has Python's interpreter lock so much that a thread which wakes up waits {each}"
        " for it",
        {
            "wake-ups": f"{profile.samples} in {profile.seconds:.1f} s",
            "waiting for the interpreter": f"{seconds:.2f} s in all",
            "that thread is in": _hottest(profile.flames, holder),
            **_slow(profile, "interpreter_lock"),
        },
        "what that thread does",
        "move it to another process, or let it release the lock (numpy and JAX do, pure Python does not)",
        f"each time that it waits for a result, the loop continues up to {each} earlier",
    )


def heap_growth(profile: ProcessProfile) -> Finding | None:
    """Python's heap grows."""
    total = sum(line.bytes for line in profile.growth)
    minute = 60 * total / profile.heap_seconds if profile.heap_seconds else 0.0
    if minute < GROWTH:
        return None
    return Finding(
        "heap_growth",
        min(minute / (1 << 30), 1.0),
        f"Python's heap grows by {minute / MIB:.0f} MiB a minute, most of all in {profile.growth[0].where}",
        {line.where: f"{line.bytes / MIB:.1f} MiB in {line.blocks} blocks" for line in profile.growth[:3]},
        "what keeps these objects",
        "drop outputs and logs once they are used; the engine's own memory does not grow once it is warm",
        f"{minute / MIB:.0f} MiB a minute less",
    )


def device_idle(profile: ProcessProfile) -> Finding | None:
    """A GPU is idle while the engine works."""
    times = max(profile.device_times, key=lambda times: times.launching + times.waiting, default=None)
    if times is None or sum(gap.seconds for gap in times.gaps) > NO_REQUESTS * sum(
        gap.count for gap in times.gaps
    ):
        return None
    share = (times.launching + times.waiting) / times.seconds
    if share < DEVICE_IDLE:
        return None
    between = times.launching > times.waiting
    return Finding(
        "device_idle",
        share,
        f"{times.device} is idle {percent(share)} of the time, mostly"
        + (" between the kernels of a program" if between else " until the host starts the next program"),
        {
            "kernels": percent(times.computing / times.seconds),
            "copies alone": percent(times.copying / times.seconds),
            "idle between kernels of a program": percent(times.launching / times.seconds),
            "idle for longer": percent(times.waiting / times.seconds),
            **{
                f"after {gap.before}": f"{duration(gap.seconds)} in {gap.count} gaps"
                for gap in times.gaps[:2]
            },
        },
        "max_num_seqs" if between else "the host's work in a step",
        "larger batches: the gaps of a step do not grow with its rows"
        if between
        else "see the finding host, and what is slow in the loop's thread",
        f"up to {1.0 / (1.0 - share):.1f} times as many tokens a second",
    )


RULES = (garbage_collection, system_calls, lock, interpreter_lock, heap_growth, device_idle)


def _slow(profile: ProcessProfile, kind: str) -> dict[str, str]:
    """Number of the slowest steps that it explains."""
    slow = slow_steps(profile)
    number = sum(any(event.kind == kind for event, _ in step.causes) for step in slow)
    return {"of the slowest steps": f"{number} of {len(slow)} waited for it"} if number else {}


def _hottest(flames: list[Flame], thread: str) -> str:
    for flame in flames:
        if flame.thread == thread and flame.stacks:
            leaves: Counter[str] = Counter()
            for stack, count in flame.stacks.items():
                leaves[stack.rpartition(";")[2]] += count
            return leaves.most_common(1)[0][0]
    return "not known"


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
    lanes, trace = _event_lanes(profile), profile.steps
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
    begin, end = slow.turn.begin - margin, slow.turn.end + margin
    lanes = [Lane("stages of the loop", stages), *_event_lanes(profile)]
    near = [lane for lane in lanes if any(b.at < end and b.at + b.seconds > begin for b in lane.bars)]
    return Chart(begin, end, near)


def _event_lanes(profile: ProcessProfile) -> list[Lane]:
    """What may have delayed the loop, by kind."""
    lanes = {kind: Lane(name, []) for kind, name in KINDS.items()}
    for event in events(profile):
        title = f"{KINDS[event.kind]}: {duration(event.seconds)} {event.text}"
        lanes[event.kind].bars.append(Bar(event.at, event.seconds, event.kind, title))
    return [*lanes.values()]


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
