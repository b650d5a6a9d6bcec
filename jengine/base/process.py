"""This process: whether it was forked, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import os

from jengine.base.errors import JengineError


def check_process(pid: int) -> None:
    """Raises JengineError unless this is the process with this id: threads and devices do not survive
    os.fork().
    """
    if os.getpid() != pid:
        raise JengineError(
            f"this model was loaded in process {pid} and cannot be used in process {os.getpid()}, which was"
            " forked from it: load it after the fork, or start processes with"
            ' multiprocessing.get_context("spawn")'
        )


def return_memory() -> None:
    """Returns freed memory to the operating system. glibc would keep it for later."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
