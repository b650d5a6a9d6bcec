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
        self._worker: _MaskWorker | None = None

    def run(self, calls: Sequence[Call]) -> dict[int, Exception]:
        """Makes these calls. Returns the exceptions that they raised, by index."""
        failures: dict[int, Exception] = {}
        first = 0
        while first < len(calls):
            batch = _Batch(calls, first, failures)
            worker = self._worker or self._started()
            worker.inbox.put(batch)
            while not batch.done.wait(self._seconds):
                if (late := batch.abandon_late(worker.clock, self._seconds)) is not None:
                    failures[late] = JengineError(f"its token mask took more than {self._seconds} s")
                    self._worker = None
                    first = late + 1
                    break
            else:
                return failures
        return failures

    def _started(self) -> _MaskWorker:
        worker = self._worker = _MaskWorker()
        weakref.finalize(self, worker.inbox.put, None)  # ends the thread when it is idle
        return worker


class _MaskWorker:
    """A thread, and the clock that measures its calls."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        measures = hasattr(time, "pthread_getcpuclockid")
        thread = threading.Thread(
            target=_work,
            args=(self.inbox, time.thread_time if measures else time.monotonic),
            name="token-masks",
            daemon=True,
        )
        thread.start()
        assert thread.ident is not None
        clock_id = time.pthread_getcpuclockid(thread.ident) if measures else time.CLOCK_MONOTONIC
        self.clock: Callable[[], float] = lambda: time.clock_gettime(clock_id)


class _Batch:
    """Calls that a worker makes, beginning with one of them."""

    def __init__(self, calls: Sequence[Call], first: int, failures: dict[int, Exception]) -> None:
        self._calls, self._failures, self._at = calls, failures, first
        self._since: float | None = None  # start of the current call, by the worker's clock
        self._given_up = False
        self._lock = threading.Lock()  # protects these
        self.done = threading.Event()

    def make(self, clock: Callable[[], float]) -> bool:
        """Makes the calls. Returns False if the batch has been abandoned."""
        while self._at < len(self._calls):
            with self._lock:
                self._since = clock()
            failure: Exception | None = None
            try:
                self._calls[self._at]()
            except Exception as error:
                failure = error
            with self._lock:
                if self._given_up:
                    return False
                if failure is not None:
                    self._failures[self._at] = failure
                self._at, self._since = self._at + 1, None
        self.done.set()
        return True

    def abandon_late(self, clock: Callable[[], float], seconds: float) -> int | None:
        """If the current call has exceeded the limit, abandons the batch and returns the call's index."""
        with self._lock:
            if self._since is None or clock() - self._since < seconds:
                return None
            self._given_up = True
            return self._at


def _work(inbox: queue.SimpleQueue[_Batch | None], clock: Callable[[], float]) -> None:
    while (batch := inbox.get()) is not None and batch.make(clock):
        del batch  # it references requests
