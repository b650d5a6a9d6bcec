"""This process: whether it was forked, its memory, Python's garbage collection, and Ctrl-C, which waits until
a change of shared state is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from jengine.base.errors import JengineError


def check_process(pid: int) -> None:
    """Raises JengineError in another process: threads and devices do not survive os.fork()."""
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


class uninterrupted:
    """Delay SIGINT until the block has ended, then handle it as usual: by default with a KeyboardInterrupt.

    Python handles signals in the main thread only, so this does nothing in others.
    """

    __slots__ = ("_before", "_held")

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        before = (
            signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        )
        # otherwise the system's default: ignored, or the process ends
        self._before = before if callable(before) else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._defer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._held is not None:
                self._before(*self._held)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
