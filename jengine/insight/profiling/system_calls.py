"""System calls by thread: counts, durations, and slow ones. From `perf trace`, `strace` or /proc."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from jengine.insight.profiling.data import CallCount, ProcessProfile, SlowCall
from jengine.insight.profiling.proc import WAITS, input_output, thread_ids
from jengine.insight.profiling.sampler import ThreadSampler
from jengine.insight.profiling.tools import Tool, installed, works

SLOW, KEPT = 1e-3, 20_000
MARKS = "poll", "ppoll"  # see Sampler.marked
PERF_LINE = re.compile(r"\s*([\d.]+) \(\s*([\d.]+) ms\): [^/]*/(\d+) (\w+)\(")
PERF_THREAD = re.compile(r" \S.* \((\d+)\), \d+ events?, ")
PERF_COUNT = re.compile(r"   (\w+)\s+(\d+)\s+\d+\s+([\d.]+)\s+")
STRACE_LINE = re.compile(r"(\d+)\s+([\d.]+) (?:<\.\.\. )?(\w+)(?:\(| resumed).*<([\d.]+)>$")

# counts, and slow calls, by thread id
Parsed = tuple[list[tuple[int, str, int, float]], list[tuple[float, float, int, str]]]


def parse_perf(text: str) -> Parsed:
    """Parses `perf trace --with-summary`: (thread, call, count, seconds), and (start, seconds, thread, call)
    on its own clock.
    """
    counts: list[tuple[int, str, int, float]] = []
    slow: list[tuple[float, float, int, str]] = []
    thread = 0
    for line in text.splitlines():
        if found := PERF_LINE.match(line):
            if len(slow) < KEPT and _listed(found[4]):
                slow.append((1e-3 * float(found[1]), 1e-3 * float(found[2]), int(found[3]), found[4]))
        elif found := PERF_THREAD.match(line):
            thread = int(found[1])
        elif found := PERF_COUNT.match(line):
            counts.append((thread, found[1], int(found[2]), 1e-3 * float(found[3])))
    return counts, slow


def parse_strace(text: str) -> Parsed:
    """The same for `strace -f -ttt -T`, whose clock is time.time()."""
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0, 0.0])
    slow: list[tuple[float, float, int, str]] = []
    for line in text.splitlines():
        if found := STRACE_LINE.match(line):
            thread, name, seconds = int(found[1]), found[3], float(found[4])
            one = sums[thread, name]
            one[0] += 1
            one[1] += seconds
            if seconds >= SLOW and len(slow) < KEPT and _listed(name):
                start = float(found[2]) - (seconds if " resumed>" in line else 0.0)
                slow.append((start, seconds, thread, name))
    return [(thread, name, int(count), seconds) for (thread, name), (count, seconds) in sums.items()], slow


def _listed(name: str) -> bool:
    """Whether slow calls of this kind are listed. Calls that only wait are not, except the sampler's
    marks.
    """
    return name not in WAITS or name in MARKS


def usual_frames(sampler: ThreadSampler) -> dict[tuple[str, str], str]:
    """For each thread and call on files, the frame in most of its samples."""
    samples = [*reversed(sampler.calls_at.most_common()), *reversed(sampler.calls.most_common())]
    return {(thread, call): where for (thread, call, where), _ in samples}


class SystemCalls:
    """Counts from `start` until `stop`.

    Args:
        how: see ProfileOptions.
        folder: for a tool's output file.
    """

    def __init__(self, how: str, folder: Path) -> None:
        self._how, self._folder = how, folder
        self._tool: Tool | None = None
        self._by = ""
        self._why: dict[str, str] = {}
        self._before: dict[int, dict[str, int]] = {}

    def start(self) -> None:
        if self._how in ("auto", "perf") and self._allowed(
            "perf trace", "perf", ["trace", "-o", "/dev/null", "true"]
        ):
            command = [
                installed("perf"),
                "trace",
                "--pid",
                "{pid}",
                "--with-summary",
                "--duration",
                "1",
                "-o",
                "{file}",
            ]
            self._tool, self._by = Tool(command, self._folder / "perf-trace"), "perf trace"
        elif self._how in ("auto", "strace") and self._allowed(
            "strace", "strace", ["-o", "/dev/null", "true"]
        ):
            command = [
                installed("strace"),
                "-f",
                "-q",
                "-ttt",
                "-T",
                "-s",
                "0",
                "-e",
                "signal=none",
                "-p",
                "{pid}",
                "-o",
                "{file}",
            ]
            self._tool, self._by = Tool(command, self._folder / "strace"), "strace"
        elif self._how in ("auto", "proc"):
            self._by = "/proc"
        # also needed if a tool turns out not to be allowed
        self._before = {thread: input_output(thread) for thread in thread_ids()}

    def _allowed(self, what: str, program: str, trial: list[str]) -> bool:
        path = installed(program)
        why = works([path, *trial]) if path else "it is not installed"
        if why:
            self._why[what] = why
        return not why

    def stop(self, profile: ProcessProfile, sampler: ThreadSampler, threads: Mapping[int, str]) -> None:
        """Adds the results to the profile.

        Args:
            threads: names by the system's ids.
        """
        if self._how == "off":
            profile.missing["system calls"] = "they were not requested"
            return
        if self._tool is not None:
            text = self._tool.stop()
            if text:
                self._take(profile, sampler, threads, text)
                self._tool = None
                return
            self._why[self._by] = self._tool.why
            self._tool, self._by = None, "/proc"
        if self._by != "/proc":
            profile.missing["system calls"] = "; ".join(f"{tool}: {why}" for tool, why in self._why.items())
            return
        if self._why:
            profile.missing["system calls of every kind"] = "; ".join(
                f"{tool}: {why}" for tool, why in self._why.items()
            )
        self._from_proc(profile, sampler, threads)

    def _take(
        self, profile: ProcessProfile, sampler: ThreadSampler, threads: Mapping[int, str], text: str
    ) -> None:
        counts, slow = (parse_perf if self._by == "perf trace" else parse_strace)(text)
        shift = self._shift(slow, sampler)
        frames = usual_frames(sampler)
        profile.calls_by = self._by
        for number, name, count, seconds in counts:
            if number in sampler.own:
                continue
            thread = threads.get(number, f"thread {number}")
            profile.calls.append(CallCount(thread, name, count, seconds, frames.get((thread, name), "")))
        profile.slow_calls += sampler.slow_calls  # many short calls in a row, each too short to be listed
        if shift is None:
            profile.missing["single slow system calls"] = (
                f"the clock of {self._by} could not be matched with the records'"
            )
            return
        seen = [(call.thread, call.name, call.at, call.at + call.seconds) for call in sampler.slow_calls]
        for at, seconds, number, name in slow:
            thread = threads.get(number, f"thread {number}")
            if name in WAITS or number in sampler.own:
                continue
            if not any((thread, name) == one[:2] and one[2] <= at + shift < one[3] for one in seen):
                profile.slow_calls.append(
                    SlowCall(at + shift, seconds, thread, name, frames.get((thread, name), ""))
                )

    def _shift(self, slow: list[tuple[float, float, int, str]], sampler: ThreadSampler) -> float | None:
        """Offset from a tool's clock to time.perf_counter()."""
        if self._by == "strace":
            return time.perf_counter() - time.time()
        # since the tool was attached
        marks = [at for at, _, thread, name in slow if thread == sampler.native and name in MARKS]
        pairs = zip(reversed(sampler.marked), reversed(marks), strict=False)
        return min((here - there for here, there in pairs), default=None)

    def _from_proc(self, profile: ProcessProfile, sampler: ThreadSampler, threads: Mapping[int, str]) -> None:
        """The kernel counts reads and writes. Time in calls on files is estimated from samples."""
        profile.calls_by, frames = "/proc", usual_frames(sampler)
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for (thread, name, _), count in sampler.calls.items():
            seconds[thread, name] += count * sampler.interval
        for number in thread_ids():
            now, before, thread = (
                input_output(number),
                self._before.get(number, {}),
                threads.get(number, f"thread {number}"),
            )
            if number in sampler.own:
                continue
            if not now and not profile.missing.get("counts of system calls"):
                profile.missing["counts of system calls"] = "/proc/self/task/*/io is missing"
            for key, name in (("syscr", "read"), ("syscw", "write")):
                count = now.get(key, 0) - before.get(key, 0)
                if count:
                    where = frames.get((thread, name), "")
                    profile.calls.append(
                        CallCount(thread, name, count, seconds.pop((thread, name), 0.0), where)
                    )
        profile.calls += [CallCount(*key, -1, spent, frames.get(key, "")) for key, spent in seconds.items()]
        if sampler.knows_calls:
            profile.slow_calls += sampler.slow_calls
        else:
            profile.missing["slow system calls"] = "/proc/self/task/*/syscall cannot be read"
