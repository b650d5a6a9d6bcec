"""Print how many processes run the tests: one for each core, if there are 5 GiB of memory for each."""

from __future__ import annotations

import os
from pathlib import Path

GIB = 1 << 30
EACH = 5 * GIB
CGROUP = Path("/sys/fs/cgroup")  # a container's limits


def jobs(cores: float, memory: float) -> int:
    return max(1, int(min(cores, memory / EACH)))


def cores(cgroup: Path = CGROUP) -> float:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _words(cgroup / "cpu.max", 2)
    return min(usable, quota / period)


def memory(cgroup: Path = CGROUP) -> float:
    """Bytes."""
    [limit] = _words(cgroup / "memory.max", 1)
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), limit)


def _words(file: Path, count: int) -> list[float]:
    """A file's numbers; infinity and ones if there is no such file, or no limit."""
    words = file.read_text().split() if file.exists() else ["max", "1"][:count]
    return [float("inf") if word == "max" else float(word) for word in words]


if __name__ == "__main__":
    print(jobs(cores(), memory()))
