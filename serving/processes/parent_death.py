"""Ensures that a child process does not outlive its parent, even if it is stopped or stuck in a call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the *thread* that started it ends (prctl(2)). Linux only; no
    effect elsewhere.

    Args:
        parent: the parent's process id. If it died before this call, this process exits immediately.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
