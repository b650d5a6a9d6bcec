"""An engine in a separate process, for AsyncLLM, so that networking and detokenizing never delay its step
loop.

A socket pair connects the two. The child inherits one end, so no other process can connect, and nothing is
left behind. The end of the stream tells either side immediately that the other has died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from jengine import EngineConfig, EngineDead, InvalidArgument, JengineError, Load
from jengine.serving.calls.model_provider import EngineInfo
from jengine.serving.processes.watchdog import Watchdog, ending_of, environment
from jengine.serving.processes.wire import (
    RECEIVE,
    Answered,
    Configure,
    Do,
    End,
    Failed,
    Frames,
    Quit,
    Ready,
    Report,
    Starting,
    StepUpdates,
    TooLarge,
    add_order,
    error_of,
    frame,
    picture_orders,
)
from jengine.spi import Ended, EngineState, FinishReason, Limits, Operation, Request, StepTotals, Updates

OnEnd = Callable[[EngineDead | None], None]
PROGRAM = "program"  # the unit of work whose time is estimated


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The progress of a start.

    Attributes:
        now: what the engine does; its `done` of `total` are 0 if unknown.
        first: what was done when the first units of this work were. They take longest, since they prepare
            what later ones share, so they do not count in estimates.
        since: monotonic seconds of that moment.
    """

    now: Starting = field(default_factory=lambda: Starting("loading libraries", "", 0, 0))
    first: int = 0
    since: float = field(default_factory=time.monotonic)

    def after(self, news: Starting) -> StartProgress:
        """The progress after a report."""
        if news.work == self.now.work and self.first:
            return replace(self, now=news)
        return StartProgress(news, news.done)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the programs are there, if the remaining ones take as long as those after the first;
        None: unknown.
        """
        now = self.now
        if now.unit != PROGRAM or not now.done:
            return None
        if now.done == now.total:
            return 0.0
        later = now.done - self.first
        return (time.monotonic() - self.since) / later * (now.total - now.done) if later else None

    def __str__(self) -> str:
        """Such as "compiling, 12 of 41 programs, about 20 s left"."""
        now, left = self.now, self.seconds_left
        if not now.total:
            return now.work
        if now.unit != PROGRAM:
            return f"{now.work}, {100 * now.done // now.total} %"
        time_left = (
            ", time left unknown" if left is None else f", about {math.ceil(left)} s left" if left else ""
        )
        return f"{now.work}, {now.done} of {now.total} programs{time_left}"


QUIT_SECONDS = 3.0  # time for a child to quit before it is killed, since it may be in the middle of a step
EXIT_SECONDS = 1.0  # time before a child that has closed its socket is killed
KILL_SECONDS = 5.0  # time for a killed child to exit; it may be stuck in a driver
WATCHDOG_SECONDS = 10.0
Done = Callable[[Any, Exception | None], object]

log = logging.getLogger("jengine.serving")


class Place(NamedTuple):
    """Where an engine process runs.

    Attributes:
        variables: of its environment, beside the server's.
        cpus: that it may use; empty: those of the server.
    """

    variables: Mapping[str, str] = {}
    cpus: frozenset[int] = frozenset()


ANYWHERE = Place()


class EngineProcess:
    """A jengine.Backend whose engine runs in a child process.

    Args:
        engine, options: a function that creates an engine, "module:function", and its keyword arguments; see
            jengine/serving/processes/engines.py.
        on_end: called once, in any thread, when a connected child has exited or hangs, with the error that
            its callers got, or None if it was asked to quit. After a hang, `quit` waits until the child has
            exited.
        watchdog_seconds: seconds without a sign of life before the child is killed; 0: wait forever. See
            watchdog.Patience.
        place: where the child runs.
        state: of the engine before it, to which it is brought first, and which it keeps up to date.

    Attributes:
        limits, load, totals, info: available when `start` has returned.
        progress: of the start.
        generated: number of tokens generated so far.
    """

    limits: Limits
    load: Load
    totals: StepTotals
    info: EngineInfo
    makes_masks = True  # a grammar that the server has not checked might crash the child
    restarts = 0  # of replicas: it is one

    def __init__(
        self,
        engine: str,
        options: dict[str, Any],
        on_end: OnEnd | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        place: Place = ANYWHERE,
        state: EngineState | None = None,
    ) -> None:
        self._state = EngineState() if state is None else state
        self._configure, self._place = Configure(engine, json.dumps(options, default=str)), place
        self.on_end, self._watchdog_seconds = on_end, watchdog_seconds
        # data for the writer to send; None ends it
        self._outbox: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        # operations that the child has not answered, by number
        self._open: dict[int, tuple[Operation[Any], Done]] = {}
        self._lock = threading.RLock()  # protects the following
        self._child: _Child | None = None
        self._awaited = self._ready = self._connected = self._quitting = False
        self.progress, self.generated = StartProgress(), 0
        self._gone = threading.Event()

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        on_end: OnEnd | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        place: Place = ANYWHERE,
        state: EngineState | None = None,
    ) -> EngineProcess:
        """An engine process that runs a model."""
        engine, options = "jengine.serving.processes.engines:model_engine", dataclasses.asdict(config)
        return cls(engine, options, on_end, watchdog_seconds, place, state)

    @property
    def backend(self) -> EngineProcess:
        """What answers; of EngineFleet, another object."""
        return self

    @property
    def pid(self) -> int | None:
        """The child's process id, available early in `start`."""
        return None if self._child is None else self._child.process.pid

    def spawn(self) -> None:
        """Starts the child, whose imports take seconds, and returns. `start` waits for it.

        Raises:
            EngineDead: after `quit`.
        """
        with self._lock:
            if self._quitting:
                raise EngineDead("the engine process was told to quit before it was started")
            if self._child is None:
                self._child, self.progress = _Child(self._watchdog_seconds, self._place), StartProgress()
                self._child.send(frame(self._configure))

    def start(self) -> None:
        """Starts the child, unless `spawn` has, and waits until it has warmed up. `quit` in another thread
        interrupts this.

        Raises:
            InvalidArgument, ModelError, OutOfMemory: as jengine.start_engine, which runs in the child.
            EngineDead: the child ended for another reason.
        """
        with self._lock:
            self.spawn()
            child, self._awaited = self._child, True
            assert child is not None
        ready = False
        try:
            for messages in child.messages():
                for message in messages:
                    if isinstance(message, Starting):
                        self.progress = self.progress.after(message)
                    elif isinstance(message, Ready):
                        ready, self.limits, self.info = True, message.limits, message.info
                        self.load, self.totals = message.load, StepTotals()
                    elif isinstance(message, StepUpdates):  # that came with it
                        self.load = message.load
                    elif isinstance(message, Failed) and not ready:
                        raise error_of(message)
                if ready:
                    break
            with self._lock:
                if not ready or self._quitting:
                    raise child.hung or child.end()
                self._ready = True
        except BaseException:
            child.process.kill()
            child.end()
            self._gone.set()
            raise

    def connect(self, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]) -> None:
        """Backend.connect. Messages of the child that arrive together are delivered together."""
        with self._lock:
            if self._child is None or self._quitting:
                fail(EngineDead("the engine process has been told to quit"))
                return
            self._connected = True
        for operation in self._state.operations():  # before any other order
            self._send(operation, partial(self._restored, operation))
        threading.Thread(
            target=self._live, args=(self._child, deliver, fail), name="engine-reader", daemon=True
        ).start()

    def add(self, *requests: Request) -> None:
        try:
            orders = [frame(order) for order in (*picture_orders(requests), add_order(requests))]
        except TooLarge as large:
            limit = f"at most {large.limit} bytes, the sampling parameters included"
            raise InvalidArgument("prompt", f"{large.size} bytes", limit) from None
        for order in orders:
            self._order(order)

    def end(self, request_id: str, reason: FinishReason, stop_reason: str | None) -> None:
        self._order(frame(End(Ended(request_id, reason, stop_reason))))

    def do(self, operation: Operation[Any], done: Done) -> None:
        if operation.local:
            limit = "arrays stay in their process: an engine in another one takes weights from a folder"
            raise InvalidArgument("operation", type(operation).__name__, limit)

        def note(answer: Any, error: Exception | None) -> None:
            if error is None:
                self._state.note(operation, answer)
            done(answer, error)

        self._send(operation, note)

    def _restored(self, operation: Operation[Any], answer: Any, error: Exception | None) -> None:
        if error is None:
            log.info("restored the state of the engine before: %s", operation)
        else:
            log.error("cannot restore the engine before, so requests may wait: %s: %s", operation, error)

    def _send(self, operation: Operation[Any], done: Done) -> None:
        number = next(self._numbers)
        order = frame(Do(number, type(operation).__name__, msgspec.json.encode(operation)))
        self._open[number] = operation, done
        self._order(order)

    def _order(self, order: bytearray) -> None:
        if not self._quitting:
            self._outbox.put(order)

    def quit(self, wait: bool = True) -> None:
        """Ends the child after its step, or by force after QUIT_SECONDS. Before `connect`, ends it
        immediately.
        """
        with self._lock:
            first, self._quitting = not self._quitting, True
            child = self._child
            if child is None:
                return
            if first and self._connected:
                self._outbox.put(frame(Quit()))
            elif first and not self._gone.is_set():
                child.process.kill()
                if self._ready or not self._awaited:  # otherwise `start` is waiting for it
                    child.end()
                    self._gone.set()
        # the writer is blocked, too: the child does not read
        if wait and not self._gone.wait(QUIT_SECONDS + 2 * EXIT_SECONDS):
            child.process.kill()
            self._gone.wait()

    # --- threads, from connect to the child's end ------------------------------------------------

    def _live(
        self, child: _Child, deliver: Callable[[Updates], None], fail: Callable[[BaseException], None]
    ) -> None:
        writer = threading.Thread(target=self._write, args=(child,), name="engine-writer", daemon=True)
        writer.start()
        error: EngineDead | None = None
        try:
            error = self._read(child, deliver)
        except Exception as wrong:  # of any kind, since callers must not wait forever
            error = EngineDead(f"the engine process sent an invalid message: {wrong}")
            child.process.kill()
        self._outbox.put(None)
        hung = child.hung  # reported to callers first, since a child stuck in a driver may take long to exit
        ended = hung or child.end(writer)
        with self._lock:
            if not hung:
                self._gone.set()
            error = None if self._quitting else hung or error or ended
        if error is not None:
            fail(error)
        if self.on_end is not None:
            self.on_end(error)
        if hung:
            child.end(writer)
            self._gone.set()

    def _read(self, child: _Child, deliver: Callable[[Updates], None]) -> EngineDead | None:
        """Reads until the child closes the socket. Returns the error that it reported."""
        error = None
        for messages in child.messages():
            updates: list[Any] = []
            for message in messages:
                if isinstance(message, StepUpdates):
                    self.load, self.totals = message.load, message.totals or self.totals
                    self.generated += len(message.tokens)
                    updates += [
                        *message.scores,
                        *message.tokens,
                        *message.pooled,
                        *message.beams,
                        *message.ended,
                    ]
                elif isinstance(message, Answered):
                    operation, done = self._open.pop(message.number)
                    if message.error is None:
                        done(operation.answer_of(message.answer), None)
                    else:
                        done(None, error_of(message.error, JengineError))
                elif isinstance(message, Failed):
                    error = EngineDead(f"the engine has failed: {error_of(message)}")
            if updates:
                deliver(updates)
        return error

    def _write(self, child: _Child) -> None:
        seconds = None
        try:
            while (data := self._outbox.get(timeout=seconds)) is not None:
                child.send(data)
                if self._quitting:
                    seconds = QUIT_SECONDS
        except queue.Empty:  # it was not asked to quit
            child.process.kill()


class _Child:
    """The process, and this side's end of the socket.

    Attributes:
        hung: the error, if the watchdog has given up the process.
    """

    def __init__(self, watchdog_seconds: float, place: Place) -> None:
        self.hung: EngineDead | None = None
        self._frames: Frames[Report] = Frames(Report)
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._watchdog = Watchdog(watchdog_seconds, partial(_spawn, theirs, place), self._fail)
                self.process = self._watchdog.process
        except BaseException:
            self._socket.close()
            raise

    def send(self, data: bytearray) -> None:
        with contextlib.suppress(ConnectionError):  # the child has died: reading reports how
            self._socket.sendall(data)

    def messages(self) -> Iterator[list[Report]]:
        """The child's messages until it closes the socket, as lists of those that arrived together.

        Raises:
            Garbled: a message is invalid.
        """
        with contextlib.suppress(ConnectionResetError):  # it closed the socket without reading all orders
            while data := self._socket.recv(RECEIVE):
                if messages := self._frames.take(data):
                    yield messages

    def _fail(self, why: str) -> None:
        """Called in the watchdog's thread. Unblocks readers and writers before the process has exited."""
        self.hung = EngineDead(f"the engine process {why}")
        with contextlib.suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self, writer: threading.Thread | None = None) -> EngineDead:
        """Waits for the process's end and frees its resources. Returns an error that describes the end."""
        code = self._wait()
        if writer is not None:
            writer.join()  # its current send fails by now
        self._watchdog.join(EXIT_SECONDS)
        self._socket.close()
        if code is None:
            log.error("the engine process %d cannot be killed, and is left behind", self.process.pid)
            return EngineDead("the engine process cannot be killed")
        return EngineDead(f"the engine process {ending_of(code)}")

    def _wait(self) -> int | None:
        for seconds in (EXIT_SECONDS, KILL_SECONDS):
            try:
                return self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return None


def _spawn(its_end: socket.socket, place: Place, beats: int, interval: float) -> subprocess.Popen[bytes]:
    ours = [its_end.fileno(), beats]
    arguments = map(str, (*ours, interval, os.getpid()))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jengine.serving.processes.engine_main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,  # library output must not mix with this process's stdout
        pass_fds=ours,
        start_new_session=True,  # a terminal's Ctrl-C is for the server, even before the child ignores it
        env={**environment(), **place.variables},
    )
    if place.cpus:  # before it has further threads, which inherit this
        os.sched_setaffinity(process.pid, place.cpus)
    return process
