"""Token masks are filled in a thread, so that a mask that takes too long fails its own request and the engine goes on."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from jengine.errors import JengineError

MASK_SECONDS = 0.2  # of processor time; nearly all masks take less than a millisecond
Call = Callable[[], object]


class MaskThread:
    """Makes calls one after the other, each with a limit.

    A call that exceeds it is given up: its thread ends with it, and another takes the next ones. So calls must release the
    interpreter's lock where they take long, and it must be harmless that one goes on for a while.

    Args:
        seconds: of processor time for each call, so that a busy machine fails none; where the system does not tell a thread's,
            of wall-clock time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._worker: _Worker | None = None

    def run(self, calls: Sequence[Call]) -> dict[int, Exception]:
        """Make these calls. Returns what they raised, by their index."""
        failures: dict[int, Exception] = {}
        first = 0
        while first < len(calls):
            batch = _Batch(calls, first, failures)
            worker = self._worker or self._started()
            worker.inbox.put(batch)
            while not batch.done.wait(self._seconds):
                if (late := batch.give_up(worker.clock, self._seconds)) is not None:
                    failures[late] = JengineError(f"its token mask took more than {self._seconds} s")
                    self._worker = None
                    first = late + 1
                    break
            else:
                return failures
        return failures

    def _started(self) -> _Worker:
        worker = self._worker = _Worker()
        weakref.finalize(self, worker.inbox.put, None)  # nothing else ends an idle thread
        return worker


class _Worker:
    """A thread, and the clock of what it takes."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        own = hasattr(time, "pthread_getcpuclockid")
        thread = threading.Thread(
            target=_work, args=(self.inbox, time.thread_time if own else time.monotonic), name="token-masks", daemon=True
        )
        thread.start()
        assert thread.ident is not None
        clock_id = time.pthread_getcpuclockid(thread.ident) if own else time.CLOCK_MONOTONIC
        self.clock: Callable[[], float] = lambda: time.clock_gettime(clock_id)


class _Batch:
    """Calls that a worker makes, from one of them on."""

    def __init__(self, calls: Sequence[Call], first: int, failures: dict[int, Exception]) -> None:
        self._calls, self._failures, self._at = calls, failures, first
        self._since: float | None = None  # when the call began that is being made, by the worker's clock
        self._given_up = False
        self._lock = threading.Lock()  # of these
        self.done = threading.Event()

    def make(self, clock: Callable[[], float]) -> bool:
        """Returns whether all were made; else the batch has been given up."""
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

    def give_up(self, clock: Callable[[], float], seconds: float) -> int | None:
        """The index of the call that is being made, if it has taken longer: then the batch ends with it."""
        with self._lock:
            if self._since is None or clock() - self._since < seconds:
                return None
            self._given_up = True
            return self._at


def _work(inbox: queue.SimpleQueue[_Batch | None], clock: Callable[[], float]) -> None:
    while (batch := inbox.get()) is not None and batch.make(clock):
        del batch  # it holds requests
