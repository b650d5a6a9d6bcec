"""Rules about the machine: growing memory, other load."""

from __future__ import annotations

import statistics

from jengine.insight.explanations.finding import Finding, percent, times
from jengine.insight.explanations.loop import STARVED
from jengine.insight.explanations.window import Window
from jengine.insight.recording.records import Memory

DRIFT = 1.25  # duration of steps relative to usual
HOST = 0.02  # minimum share of time spent planning for its CPU time to be significant
SAMPLES, SECONDS = 8, 15.0  # minimum number of memory samples, and of seconds, for a trend
GROWTH = 16 << 20  # bytes a minute
MIB = 1 << 20


def busy_machine(window: Window) -> Finding | None:
    """Steps take longer than usual, or the loop does not get a processor."""
    if not window.enough:
        return None
    drift = statistics.median([step.drift for step in window.steps])
    spent = window.spent
    own = sum([spent[stage] for stage in ("schedule", "pack", "collect", "text")])
    starved = window.processor < STARVED and spent["schedule"] >= HOST * window.busy
    if drift < DRIFT and not starved:
        return None
    waits = (1.0 - window.processor) * own
    without = max(window.busy - waits - (1.0 - 1.0 / max(drift, 1.0)) * spent["wait"], window.busy / 10)
    return Finding(
        "busy_machine",
        1.0 - without / window.busy,
        f"steps take {drift:.2f} times as long as usual, and the loop has a processor"
        f" {percent(window.processor)} of its time",
        {
            "steps, against their costs": f"{drift:.2f} times",
            "processor time of the loop": percent(window.processor),
        },
        "what else runs here",
        "other processes and threads use the processors: move them away, or leave them some (cpu_threads, or"
        " one engine fewer)",
        times(window.busy / without),
    )


def memory_growth(window: Window) -> Finding | None:
    """The process's memory keeps growing."""
    samples = window.trace.memories
    if len(samples) < SAMPLES or samples[-1].at - samples[0].at < SECONDS:
        return None
    late = samples[len(samples) // 4 :]  # without the beginning, which fills caches
    slope = statistics.linear_regression([s.at for s in late], [s.resident for s in late]).slope
    if 60 * slope < max(GROWTH, 0.02 * late[0].resident) or not _steady(late):
        return None
    left = samples[-1].available
    until = f"memory lasts for {left / slope / 60:.0f} minutes more" if left else "memory ends"
    return Finding(
        "memory_growth",
        min(60 * slope / late[-1].resident, 1.0),
        f"the process takes {60 * slope / MIB:.0f} MiB more each minute",
        {
            "resident": (
                f"{late[0].resident / MIB:.0f} to {late[-1].resident / MIB:.0f} MiB in"
                f" {late[-1].at - late[0].at:.0f} s"
            ),
            "available": f"{left / MIB:.0f} MiB" if left else "not known",
        },
        "what this process keeps",
        "the engine's own memory does not grow once it is warm: look for outputs or other objects that are"
        " kept (tracemalloc shows them)",
        until,
    )


def _steady(samples: list[Memory]) -> bool:
    """Whether each third of the samples is larger than the previous one."""
    third = len(samples) // 3
    parts = [samples[:third], samples[third : 2 * third], samples[2 * third :]]
    means = [statistics.fmean([sample.resident for sample in part]) for part in parts]
    return means[0] < means[1] < means[2]
