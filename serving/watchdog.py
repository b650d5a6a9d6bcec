"""Notices an engine process that hangs: one that is stopped, or whose step loop makes no progress.

The process sends beats through a pipe, one at each interval. A thread of its own writes them, so without beats the whole process stands
still. What they say comes from the step loop, so a loop that hangs is noticed although they arrive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_SECONDS = 60.0  # without a beat while the engine starts: imports and drivers may hold the interpreter's lock for seconds
STEP_FACTOR = 5.0  # a step may take this many times the longest one known, beside the option's seconds
DUMP_SECONDS = 0.5  # for the process to write its stacks, before it is killed
LONGEST_INTERVAL = 1.0
STARTING, IDLE, WORKING = range(3)  # phases

log = logging.getLogger("jengine.serving")


class Beat(NamedTuple):
    """What the process says of its step loop.

    Attributes:
        phase: STARTING, IDLE (the loop waits for requests) or WORKING.
        turns: turns of the loop so far.
        longest_step: in seconds; measured at warm-up or since.
    """

    phase: int
    turns: int
    longest_step: float


_RECORD = struct.Struct("<bQd")  # far below PIPE_BUF: written whole or not at all


def interval_of(seconds: float) -> float:
    """Seconds between beats for a limit of this many."""
    return min(seconds / 10, LONGEST_INTERVAL)


# --- in the engine process -------------------------------------------------------------------------


class Heartbeat:
    """Beats from `start` on. All other methods are the step loop's.

    Args:
        pipe: where beats are written; nonblocking, for a server that does not read.
        interval: seconds between two beats; 0 sends none.
    """

    def __init__(self, pipe: int, interval: float) -> None:
        self._pipe, self._interval = pipe, interval
        self._phase, self._turns, self._longest = STARTING, 0, 0.0
        self._since = 0.0  # when the turn began
        self._lock = threading.Lock()  # so that beats are written in order

    def start(self) -> None:
        if self._interval:
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def ready(self, longest_step: float) -> None:
        """The engine has started. Call before the first turn; longest_step: in seconds, as measured at warm-up, or 0."""
        self._longest, self._phase = longest_step, IDLE
        self._beat()  # who hears that the engine is ready must not take it for one that starts

    def turn(self) -> None:
        """The loop has made progress: a turn is over, and another begins."""
        now = time.monotonic()
        if self._phase == WORKING:
            self._longest = max(self._longest, now - self._since)
        self._since, self._phase = now, WORKING
        self._turns += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """The loop waits for requests meanwhile, for as long as it takes."""
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
    """Decides from beats alone whether the process hangs.

    Args:
        seconds: that may pass without a beat (START_SECONDS in a start), or without a turn of a working loop beyond the time of a step.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = Beat(STARTING, 0, 0.0)
        self._silent = self._stuck = 0.0

    def after(self, passed: float, beat: Beat | None) -> str | None:
        """This many seconds have passed, which brought this beat or none. Returns why the process is to be given up, if it is."""
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
    """Starts an engine process and watches it, in a thread that ends after the process or when it is given up.

    The kernel ties `die_with_parent` to the thread that starts a process, which therefore has to live as long.

    Args:
        seconds: see Patience; 0 does not watch.
        spawn: starts the process, which inherits this descriptor, and is to beat at this interval.
        on_hang: called in the thread with the reason, when the process has been killed because it hangs.

    Attributes:
        process: the process.

    Raises:
        Whatever `spawn` raises.
    """

    def __init__(self, seconds: float, spawn: Callable[[int, float], subprocess.Popen[bytes]], on_hang: Callable[[str], None]) -> None:
        self._seconds, self._interval, self._on_hang = seconds, interval_of(seconds), on_hang
        spawned: Future[subprocess.Popen[bytes]] = Future()
        self._thread = threading.Thread(target=self._live, args=(spawn, spawned), name="engine-watchdog", daemon=True)
        self._thread.start()
        self.process = spawned.result()

    def join(self, seconds: float) -> None:
        """Wait for the thread's end, which follows that of the process."""
        self._thread.join(seconds)

    def _live(self, spawn: Callable[[int, float], subprocess.Popen[bytes]], spawned: Future[subprocess.Popen[bytes]]) -> None:
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
                self._give_up(process, why)
        finally:
            os.close(ours)

    def _watch(self, pipe: int) -> str | None:
        """Until the process ends, or there is a reason to give it up."""
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
            passed, last = min(now - last, 2 * self._interval), now  # time in which the server itself did not run does not count
            if self._seconds and (why := patience.after(passed, beat)):
                return why

    def _give_up(self, process: subprocess.Popen[bytes], why: str) -> None:
        log.error("the engine process %s; its state is %s; killing it", why, _state(process.pid))
        process.send_signal(signal.SIGUSR1)  # its threads' stacks go to stderr, if it still runs
        time.sleep(DUMP_SECONDS)
        process.kill()
        self._on_hang(why)


def _state(pid: int) -> str:
    """What the kernel says of a process, such as "T (stopped)"; empty where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")
