"""Print how many processes run the tests: one for each core, if there are 5 GiB of memory for each."""

from __future__ import annotations

import os
from pathlib import Path

from jengine.base.host_memory import total_memory

GIB = 1 << 30
EACH = 5 * GIB
CGROUP = Path("/sys/fs/cgroup")  # a container's limits


def jobs(cores: float, memory: float) -> int:
    return max(1, int(min(cores, memory / EACH)))


def cores(cgroup: Path = CGROUP) -> float:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    file = cgroup / "cpu.max"
    quota, period = file.read_text().split() if file.exists() else ["max", "1"]
    return usable if quota == "max" else min(usable, float(quota) / float(period))


if __name__ == "__main__":
    print(jobs(cores(), total_memory()))
