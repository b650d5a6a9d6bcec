"""A profile as a self-contained HTML page: first the findings in words, then the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files

from jengine.insight.explanations.explain import explain
from jengine.insight.explanations.finding import Finding, duration, percent
from jengine.insight.profiling.data import Flame, ProcessProfile, Profile
from jengine.insight.profiling.findings import findings
from jengine.insight.profiling.slow_steps import Event, SlowStep, events, slow_steps, turns
from jengine.insight.profiling.svg import Bar, Lane, flame, lanes
from jengine.insight.recording.perfetto import stage_begins
from jengine.insight.recording.records import STAGES

FLAMES = 12  # number of threads with a flame graph
KINDS = {
    "garbage_collection": "garbage collection",
    "lock": "waiting for locks",
    "system_calls": "system calls",
    "interpreter_lock": "interpreter lock",
}
MIB = 1 << 20


def report_html(profile: Profile, jax: str = "") -> str:
    """The page.

    Args:
        jax: name of the file with jax.profiler's capture in the same folder; empty if there is none.
    """
    first = profile.processes[0]
    when = datetime.fromtimestamp(first.unix).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    parts = [
        f"<h1>Profile of {escape(profile.target)}</h1>",
        f"<p>{when}; {first.seconds:.1f} s; "
        + "; ".join(f"{escape(p.name)}: process {p.pid}" for p in profile.processes)
        + "</p>",
        _findings(profile),
        *[_process(process, jax if process.operations else "") for process in profile.processes],
    ]
    style = files("jengine.insight.profiling").joinpath("report.css").read_text(encoding="utf-8")
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Profile of'
        f" {escape(profile.target)}</title><style>\n{style}</style>"
    )
    return f"{head}<main>{''.join(parts)}</main></html>\n"


def summary(profile: Profile) -> str:
    """The findings as text, for a terminal."""
    pairs = findings(profile)
    if not pairs:
        return "No findings: none of the measurements shows a delay."
    return "\n\n".join(f"{process.name}: {finding}" for process, finding in pairs)


# --- words -----------------------------------------------------------------------------------------


def _findings(profile: Profile) -> str:
    pairs = findings(profile)
    out = ["<h2>Findings</h2>"]
    out += [_finding(finding, process.name) for process, finding in pairs]
    if not pairs:
        out.append('<p class="good">None: none of the measurements shows a delay.</p>')
    for process in profile.processes:
        trace = process.steps
        if trace is not None and trace.steps:
            out.append(f"<p>By <code>jengine explain</code>: {escape(explain(trace).summary)}</p>")
    if pairs:
        out.append("<p>Profiling itself loads a small machine.</p>")
    if not any(process.trace for process in profile.processes):
        out.append("<p>No engine stepped in this time.</p>")
    return "".join(out)


def _finding(finding: Finding, process: str) -> str:
    rows = "".join(f"<tr><td>{escape(name)}<td>{escape(value)}" for name, value in finding.evidence.items())
    name = f'<span class="kind {finding.name}">{escape(finding.name)}</span>'
    return (
        f'<section class="finding"><h3>{name} {escape(process)}:'
        f" {escape(finding.summary)}</h3><table>{rows}</table><p><b>Change {escape(finding.option)}</b>:"
        f" {escape(finding.change)}. Effect: {escape(finding.effect)}.</p></section>"
    )


# --- a process -------------------------------------------------------------------------------------


def _process(profile: ProcessProfile, jax: str) -> str:
    parts = [
        (
            f"<h2>{escape(profile.name)}, process"
            f" {profile.pid}</h2><p><code>{escape(profile.command)}</code></p>"
        ),
        _missing(profile),
        _time_line(profile),
        _slow(profile),
        _flames(profile),
        _waiting(profile),
        _collections(profile),
        _calls(profile),
        _memory(profile),
        _counters(profile),
        _jax(profile, jax),
    ]
    return "".join(parts)


def _missing(profile: ProcessProfile) -> str:
    if not profile.missing:
        return ""
    rows = "".join(f"<li>{escape(what)}: {escape(why)}" for what, why in profile.missing.items())
    return f'<div class="missing"><b>Not measured</b><ul>{rows}</ul></div>'


def _time_line(profile: ProcessProfile) -> str:
    happened, trace = events(profile), profile.steps
    every = [
        Lane(name, [_bar(event) for event in happened if event.kind == kind]) for kind, name in KINDS.items()
    ]
    tall = None
    if trace is not None and trace.steps:
        tall = Lane(
            "iterations of the loop",
            [
                Bar(t.begin, t.seconds, "step", f"step {t.step.number}, {t.step.name}: {duration(t.seconds)}")
                for t in turns(trace.steps)
            ],
        )
    return "<h3>Time line</h3>" + lanes(profile.begun, profile.ended, every, tall)


def _bar(event: Event) -> Bar:
    return Bar(
        event.at, event.seconds, event.kind, f"{KINDS[event.kind]}: {duration(event.seconds)} {event.text}"
    )


def _slow(profile: ProcessProfile) -> str:
    if profile.steps is None:
        return ""
    slow = slow_steps(profile)
    if not slow:
        return "<h3>Slow steps</h3><p>None took much longer than others like it.</p>"
    return "<h3>Slow steps</h3>" + "".join(_slow_step(profile, step) for step in slow)


def _slow_step(profile: ProcessProfile, slow: SlowStep) -> str:
    margin = 0.3 * slow.turn.seconds
    begin, end = slow.turn.begin - margin, slow.turn.end + margin
    near = [event for event in events(profile) if event.at < end and event.at + event.seconds > begin]
    trace = profile.steps
    assert trace is not None
    stages: list[Bar] = []
    for step in trace.steps:
        for stage, at in stage_begins(step).items():
            seconds = getattr(step, stage)
            if seconds and at < end and at + seconds > begin:
                stages.append(
                    Bar(
                        at,
                        seconds,
                        f"s{STAGES.index(stage) % 8}",
                        f"{stage}: step {step.number}, {duration(seconds)}",
                    )
                )
    every = [Lane("stages of the loop", stages)]
    every += [
        Lane(name, bars)
        for kind, name in KINDS.items()
        if (bars := [_bar(event) for event in near if event.kind == kind])
    ]
    return f"<details open><summary>{escape(str(slow))}</summary>{lanes(begin, end, every)}</details>"


def _flames(profile: ProcessProfile) -> str:
    out = ["<h3>Where threads are, running or waiting</h3><p>Point at a frame for its share.</p>"]
    chosen = sorted(profile.flames, key=lambda graph: (graph.thread not in profile.important, -graph.samples))
    for number, graph in enumerate(chosen[:FLAMES]):
        out.append(_flame(graph, open=number < 2))
    if len(chosen) > FLAMES:
        out.append(f"<p>{len(chosen) - FLAMES} more threads have fewer samples.</p>")
    return "".join(out)


def _flame(graph: Flame, open: bool) -> str:
    state = " open" if open else ""
    return (
        f"<details{state}><summary>{escape(graph.thread)}: {graph.samples}"
        f" samples</summary>{flame(graph.stacks)}</details>"
    )


def _waiting(profile: ProcessProfile) -> str:
    looks, share = max(profile.samples, 1), percent(profile.late / max(profile.seconds, 1e-9))
    out = [
        "<h3>Waiting for the interpreter and for locks</h3>",
        (
            f"<p>A thread woke {profile.samples} times, and waited for the interpreter's lock:"
            f" {duration(profile.late / looks)} on average, {share} of the time in all. That is how late it"
            " was, less what the kernel says that it waited for a processor.</p>"
        ),
        (
            "<p>A wait for a lock is seen where two looks in a row find a thread at the same acquisition. Who"
            " holds the lock is read from the source: a thread within a <code>with</code> of the same name,"
            " or further on in the same function.</p>"
        ),
    ]
    waits: dict[tuple[str, str, str, str], list[float]] = {}
    for wait in profile.lock_waits:
        waits.setdefault((wait.thread, wait.lock, wait.where, wait.holder), []).append(wait.seconds)
    rows = sorted(
        ([*key, str(len(some)), duration(sum(some)), duration(max(some))] for key, some in waits.items()),
        key=lambda row: row[0],
    )
    if rows:
        out.append(
            _table(["thread", "lock", "in", "very likely held by", "waits", "in all", "longest"], rows[:30])
        )
    else:
        out.append("<p>No thread was seen waiting for a lock.</p>")
    return "".join(out)


def _collections(profile: ProcessProfile) -> str:
    rows = [
        [str(generation), str(count), duration(seconds)]
        for generation, (count, seconds) in enumerate(profile.pauses)
    ]
    longest = sorted(profile.collections, key=lambda collection: -collection.seconds)[:5]
    more = [
        [
            duration(collection.seconds),
            str(collection.generation),
            str(collection.collected),
            collection.thread,
            f"{collection.begun - profile.begun:.2f} s",
        ]
        for collection in longest
    ]
    out = "<h3>Garbage collection</h3>" + _table(["generation", "collections", "in all"], rows)
    return out + (_table(["longest", "generation", "objects freed", "thread", "at"], more) if more else "")


def _calls(profile: ProcessProfile) -> str:
    if not profile.calls:
        return ""
    calls = sorted(profile.calls, key=lambda call: -call.seconds)[:40]
    rows = [
        [c.thread, c.name, str(c.count) if c.count >= 0 else "not known", duration(c.seconds), c.where]
        for c in calls
    ]
    return (
        "<h3>System calls</h3><p>Reads and writes as the kernel counts them; other calls, and times, by"
        " samples.</p>" + _table(["thread", "call", "count", "in all", "most often in"], rows)
    )


def _memory(profile: ProcessProfile) -> str:
    out = "<h3>Memory</h3>"
    if profile.memory:
        rows = [
            [part, f"{size / MIB:,.1f}"]
            for part, size in sorted(profile.memory.items(), key=lambda entry: -entry[1])
        ]
        out += _table(["resident", "MiB"], rows)
    if profile.device:
        out += _table(
            ["on devices", "MiB"], [[part, f"{size / MIB:,.1f}"] for part, size in profile.device.items()]
        )
    if profile.heap_seconds:
        out += f"<p>Growth of Python's heap in {profile.heap_seconds:.1f} s:</p>"
        rows = [[line.where, f"{line.bytes / 1024:,.1f}", str(line.blocks)] for line in profile.growth]
        out += _table(["line", "KiB", "blocks"], rows) if rows else "<p>None.</p>"
    return out


def _counters(profile: ProcessProfile) -> str:
    rows = [[name, f"{value:,.2f}".rstrip("0").rstrip(".")] for name, value in profile.counters.items()]
    return "<h3>Counters</h3>" + _table(["counter", "value"], rows)


def _jax(profile: ProcessProfile, file: str) -> str:
    if not profile.operations:
        return ""
    where = (
        f' The whole capture is in <a href="{escape(file)}">{escape(file)}</a>, for XProf or Perfetto.'
        if file
        else ""
    )
    rows = [[name, str(count), duration(seconds)] for name, count, seconds in profile.operations]
    return (
        "<h3>Operations of JAX</h3><p>By jax.profiler, over all threads and devices; calls contain"
        f" others.{where}</p>" + _table(["operation", "count", "in all"], rows)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(name)}" for name in head) + f"{body}</table>"
