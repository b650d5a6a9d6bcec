"""Priority of threads that work beside running steps."""

from __future__ import annotations

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Of this thread, for good; where the system has one for each thread."""
    if hasattr(os, "setpriority") and hasattr(os, "sched_getaffinity"):  # Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
