"""Priority of threads that run in parallel with steps."""

from __future__ import annotations

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Lowers this thread's priority permanently, on systems with priorities per thread."""
    if hasattr(os, "setpriority") and hasattr(os, "sched_getaffinity"):  # Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
