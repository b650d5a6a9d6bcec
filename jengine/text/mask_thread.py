"""Computes token masks in a thread, so that a mask that takes too long fails only its own request."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from jengine.base.errors import JengineError

MASK_SECONDS = 0.2  # of CPU time; nearly all masks take less than a millisecond
Call = Callable[[], object]
_Batch = tuple[Sequence[Call], int, dict[int, Exception], threading.Event]  # calls, and the first of them


class MaskThread:
    """Makes calls one after the other, each with a time limit.

    A call that exceeds the limit is abandoned: its thread ends with it, and another thread makes the next
    calls. So slow calls must release the interpreter's lock, and it must be harmless if they continue for a
    while.

    Args:
        seconds: CPU time for each call, so that a busy machine causes no failures. Wall-clock time on systems
            that do not report a thread's CPU time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._worker: _Worker | None = None

    def run(self, calls: Sequence[Call]) -> dict[int, Exception]:
        """Makes these calls. Returns the exceptions that they raised, by index."""
        failures: dict[int, Exception] = {}
        first = 0
        while first < len(calls):
            worker, done = self._worker or self._started(), threading.Event()
            worker.inbox.put((calls, first, failures, done))
            while not done.wait(self._seconds):
                if (late := worker.abandon_late(self._seconds)) is not None:
                    failures[late] = JengineError(f"its token mask took more than {self._seconds} s")
                    self._worker = None
                    first = late + 1
                    break
            else:
                return failures
        return failures

    def _started(self) -> _Worker:
        worker = self._worker = _Worker()
        weakref.finalize(self, worker.inbox.put, None)  # ends the thread when it is idle
        return worker


class _Worker:
    """A thread that makes calls until one is late, and the clock that measures them."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._at = 0  # index of the current call
        self._since: float | None = None  # its start; None: there is none
        self._given_up = False
        self._lock = threading.Lock()  # protects these
        thread = threading.Thread(target=self._work, name="token-masks", daemon=True)
        thread.start()
        assert thread.ident is not None
        measures = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread.ident) if measures else time.CLOCK_MONOTONIC

    def _work(self) -> None:
        while (batch := self.inbox.get()) is not None and self._made(*batch):
            del batch  # it references requests

    def _made(
        self, calls: Sequence[Call], first: int, failures: dict[int, Exception], done: threading.Event
    ) -> bool:
        """Makes the calls from `first` on. Returns False if they have been abandoned."""
        for at in range(first, len(calls)):
            with self._lock:
                self._at, self._since = at, time.clock_gettime(self._clock)
            failure: Exception | None = None
            try:
                calls[at]()
            except Exception as error:
                failure = error
            with self._lock:
                if self._given_up:
                    return False
                if failure is not None:
                    failures[at] = failure
                self._since = None
        done.set()
        return True

    def abandon_late(self, seconds: float) -> int | None:
        """If the current call has exceeded the limit, abandons the calls and returns its index."""
        with self._lock:
            if self._since is None or time.clock_gettime(self._clock) - self._since < seconds:
                return None
            self._given_up = True
            return self._at
