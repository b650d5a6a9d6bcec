"""Detects an engine process that hangs: it is stopped, or its step loop makes no progress.

The process sends heartbeats through a pipe at regular intervals. A separate thread writes them, so missing
heartbeats mean that the whole process is stopped. Their content comes from the step loop, so a hanging loop
is detected although heartbeats arrive.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

# limit during the start, when imports and drivers may hold the interpreter's lock for seconds
START_SECONDS = 60.0
STEP_FACTOR = 5.0  # a step may take this many times the longest known one, in addition to watchdog_seconds
DUMP_SECONDS = 0.5  # time for the process to write its stacks before it is killed
LONGEST_INTERVAL = 1.0
STARTING, IDLE, WORKING = range(3)  # phases
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Spawn = Callable[[int, float], subprocess.Popen[bytes]]
log = logging.getLogger("jengine.serving")


class Beat(NamedTuple):
    """The state of the step loop, as reported by the process.

    Attributes:
        phase: STARTING, IDLE (nothing is expected of the loop) or WORKING.
        turns: number of iterations of the loop so far.
        longest_step: in seconds; measured at warm-up or since.
    """

    phase: int
    turns: int
    longest_step: float


_RECORD = struct.Struct("<bQd")  # smaller than PIPE_BUF, so that writes are atomic


# --- in the engine process -------------------------------------------------------------------------


class Heartbeat:
    """Sends heartbeats after `start`. The step loop calls all other methods.

    Args:
        pipe: descriptor for heartbeats; nonblocking, in case the server does not read.
        interval: seconds between heartbeats; 0: none are sent.
    """

    def __init__(self, pipe: int, interval: float) -> None:
        self._pipe, self._interval = pipe, interval
        self._phase, self._turns, self._longest = STARTING, 0, 0.0
        self._since = 0.0  # start of the iteration
        self._lock = threading.Lock()  # keeps heartbeats in order

    def start(self) -> None:
        if self._interval:
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def ready(self, longest_step: float) -> None:
        """The engine has started. Call before the first iteration. longest_step: seconds, as measured at
        warm-up, or 0.
        """
        self._longest, self._phase = longest_step, IDLE
        self._beat()  # the server must not regard a ready engine as starting

    def turn(self) -> None:
        """The loop has completed an iteration and begins another."""
        now = time.monotonic()
        if self._phase == WORKING:
            self._longest = max(self._longest, now - self._since)
        self._since, self._phase = now, WORKING
        self._turns += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """A context that may last any time: the loop waits for requests, or moves weights."""
        self._phase = IDLE
        yield
        self.turn()

    def _run(self) -> None:
        while True:
            self._beat()
            time.sleep(self._interval)

    def _beat(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, _RECORD.pack(self._phase, self._turns, self._longest))


# --- in the server ---------------------------------------------------------------------------------


class Patience:
    """Decides from heartbeats alone whether the process hangs.

    Args:
        seconds: maximum time without a heartbeat (START_SECONDS during the start), or without an iteration
            beyond the time of a step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = Beat(STARTING, 0, 0.0)
        self._silent = self._stuck = 0.0

    def after(self, passed: float, beat: Beat | None) -> str | None:
        """Records that this many seconds have passed with this heartbeat or none. Returns the reason to give
        up, if any.
        """
        self._silent += passed
        self._stuck += passed
        if beat is None:
            limit = max(self._seconds, START_SECONDS) if self._last.phase == STARTING else self._seconds
            return f"has not answered for {self._silent:.1f} s" if self._silent > limit else None
        self._silent = 0.0
        if beat.phase != WORKING or beat.turns != self._last.turns:
            self._stuck = 0.0
        self._last = beat
        limit = self._seconds + STEP_FACTOR * beat.longest_step
        return f"has been in one step for {self._stuck:.1f} s" if self._stuck > limit else None


class Watchdog:
    """Starts an engine process and watches it, in a thread that ends after the process, or when it gives up.

    The kernel ties `die_with_parent` to the thread that starts a process, so that thread must live as long.

    Args:
        seconds: see Patience; 0: does not watch.
        spawn: starts the process, which inherits this descriptor and must send heartbeats at this interval.
        on_hang: called in the thread with the reason, before a hanging process is killed.

    Attributes:
        process: the process.

    Raises:
        Any error raised by `spawn`.
    """

    def __init__(self, seconds: float, spawn: Spawn, on_hang: Callable[[str], None]) -> None:
        self._seconds, self._on_hang = seconds, on_hang
        self._interval = min(seconds / 10, LONGEST_INTERVAL)  # seconds between heartbeats
        spawned: Future[subprocess.Popen[bytes]] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(spawn, spawned), name="engine-watchdog", daemon=True
        )
        self._thread.start()
        self.process = spawned.result()

    def join(self, seconds: float) -> None:
        """Waits for the thread's end, which follows that of the process."""
        self._thread.join(seconds)

    def _live(self, spawn: Spawn, spawned: Future[subprocess.Popen[bytes]]) -> None:
        ours, theirs = os.pipe()
        try:
            try:
                os.set_blocking(theirs, False)
                process = spawn(theirs, self._interval)
            except BaseException as error:
                spawned.set_exception(error)
                return
            finally:
                os.close(theirs)
            spawned.set_result(process)
            if why := self._watch(ours):
                self._kill(process, why)
        finally:
            os.close(ours)

    def _watch(self, pipe: int) -> str | None:
        """Watches until the process ends, or there is a reason to give up."""
        poll, patience = select.poll(), Patience(self._seconds)
        poll.register(pipe, select.POLLIN)
        last = time.monotonic()
        while True:
            beat = None
            if poll.poll(1000 * self._interval or None):
                data = os.read(pipe, 1000 * _RECORD.size)
                if not data:
                    return None
                beat = Beat(*_RECORD.unpack(data[-_RECORD.size :]))
            now = time.monotonic()
            # excludes time in which the server itself did not run
            passed, last = min(now - last, 2 * self._interval), now
            if self._seconds and (why := patience.after(passed, beat)):
                return why

    def _kill(self, process: subprocess.Popen[bytes], why: str) -> None:
        log.error("the engine process %s; its state is %s; killing it", why, _state(process.pid))
        process.send_signal(signal.SIGUSR1)  # makes it write its threads' stacks to stderr, if it still runs
        time.sleep(DUMP_SECONDS)
        self._on_hang(why)  # first, or who sees the process end would not know why
        process.kill()


def _state(pid: int) -> str:
    """The kernel's state of the process, such as "T (stopped)"; empty if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def environment() -> dict[str, str]:
    """Variables for a child process, which imports from where this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def ending_of(code: int) -> str:
    """How a process with this return code has ended."""
    if code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"exited with code {code}"


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
