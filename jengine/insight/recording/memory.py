"""Memory use of this process."""

from __future__ import annotations

import os
import resource
import sys

from jengine.base.host_memory import available_memory
from jengine.insight.recording.records import Memory


def memory(now: float) -> Memory:
    """Current memory; takes less than a millisecond. Without /proc, resident is the maximum so far."""
    try:
        with open("/proc/self/statm", "rb") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resident = peak if sys.platform == "darwin" else peak * 1024
    return Memory(now, resident, available_memory())
