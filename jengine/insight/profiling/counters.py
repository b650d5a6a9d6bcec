"""Counters of the CPU and the kernel, from `perf stat` or, without it, from the kernel alone."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from jengine.insight.profiling.data import ProcessProfile
from jengine.insight.profiling.tools import Tool, installed

HARDWARE = ("cycles", "instructions", "cache-references", "cache-misses", "branches", "branch-misses")
KERNEL = ("task-clock", "context-switches", "cpu-migrations", "page-faults")


def parse_stat(text: str) -> dict[str, float]:
    """Parses `perf stat -x ,`: values by counter, without unsupported ones. task-clock is in milliseconds."""
    values = {}
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) < 3 or line.startswith("#"):
            continue
        value, name = fields[0], fields[2].partition(":")[0]
        with contextlib.suppress(ValueError):  # "<not supported>", "<not counted>"
            values[name] = float(value)
    return values


class Counters:
    """Counts from `start` until `stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tool: Tool | None = None
        self._before = _of_kernel()

    def start(self) -> None:
        self._before = _of_kernel()
        if program := installed("perf"):
            command = [
                program,
                "stat",
                "--pid",
                "{pid}",
                "-x",
                ",",
                "-o",
                "{file}",
                "-e",
                ",".join((*HARDWARE, *KERNEL)),
            ]
            self._tool = Tool(command, self._folder / "perf-stat")

    def stop(self, profile: ProcessProfile) -> None:
        """Adds the results to the profile."""
        values = parse_stat(self._tool.stop()) if self._tool is not None else {}
        if self._tool is None:
            profile.missing["hardware counters"] = "perf is not installed"
        elif not values:
            profile.missing["hardware counters"] = f"perf stat: {self._tool.why}"
        elif lost := [name for name in HARDWARE if name not in values]:
            profile.missing["hardware counters"] = f"this machine does not support {', '.join(lost)}" + (
                " (virtual machines often have none)" if len(lost) == len(HARDWARE) else ""
            )
        after = _of_kernel()
        profile.counters = {**{name: after[name] - self._before[name] for name in after}, **values}


def _of_kernel() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "processor seconds, user": usage.ru_utime,
        "processor seconds, system": usage.ru_stime,
        "voluntary switches": float(usage.ru_nvcsw),
        "involuntary switches": float(usage.ru_nivcsw),
        "page faults": float(usage.ru_minflt + usage.ru_majflt),
    }
