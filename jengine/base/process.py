"""This process: whether it was forked, its memory, and Python's garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, for what creates many objects that stay and are then old."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < 1000:  # the interpreter's; with more, the user's would thaw
            gc.freeze()
            gc.unfreeze()  # to the oldest generation
        if enabled:
            gc.enable()
