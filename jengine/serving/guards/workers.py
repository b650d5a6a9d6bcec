"""A few disposable processes that do jobs of clients, who take turns."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from jengine import JengineError
from jengine.serving.calls.errors import Busy
from jengine.serving.processes.turns import Turns
from jengine.serving.processes.watchdog import ending_of, environment
from jengine.serving.processes.wire import RECEIVE, Done, Frames, Job, Picture, frame

WORKERS = 2  # maximum number of processes; each starts when a job finds no idle one
# wall-clock limits; a limit on processor time usually ends a job earlier, unless its process is stopped
START_SECONDS, JOB_SECONDS = 120.0, 30.0
MOST_WAITING = 256  # jobs
ATTEMPTS = 3  # processes that may be killed from outside before a job is given up
# signals that no job causes
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

log = logging.getLogger("jengine.serving")


class WorkerLost(JengineError):
    """A worker ended in the middle of a job, or was killed.

    Attributes:
        cause: "job" if the job is to blame; "outside" if the process was killed by a signal that no job
            causes; "late" if it was not done in time, though it used little processor time: it is stopped, or
            the machine is busy.
        seconds: processor time used.
    """

    def __init__(self, why: str, cause: Literal["job", "outside", "late"], seconds: float = 0.0) -> None:
        super().__init__(why)
        self.cause, self.seconds = cause, seconds


class Result(NamedTuple):
    """What a job gives; for an image, pictures."""

    done: Done
    pictures: list[Picture]


class Workers:
    """Processes of one kind. Belongs to one event loop.

    A client has one job at a time, and clients take turns. A thread waits for each worker, so event loop and
    workers do not block each other.

    Args:
        command: the module that they run, and its kind of work. Further arguments come with each job: a
            process does those that have the same.
        what: they work on, in the plural, for messages.
        most: maximum number of jobs at a time.
        idle: maximum number of processes, if it is larger: those that are kept for other arguments.
        waiting: maximum number of jobs that wait or run.
        charge: called with the client and the processor seconds of each of its jobs, in the context of the
            request.
    """

    def __init__(
        self,
        command: tuple[str, str],
        what: str,
        max_jobs: int = WORKERS,
        charge: Callable[[str, float], None] = lambda client, seconds: None,
        *,
        idle: int = 0,
        waiting: int = MOST_WAITING,
    ) -> None:
        self._command, self._what, self._most, self._charge = command, what, max_jobs, charge
        self._processes, self._most_waiting = max(max_jobs, idle), waiting
        self._threads = ThreadPoolExecutor(max_jobs, thread_name_prefix="sandbox")
        self._idle: list[_Worker] = []
        self._running: set[_Worker] = set()
        self._closed, self._lock = False, threading.Lock()  # protects these
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._served: set[str] = set()  # clients whose jobs run

    async def run(self, client: str, arguments: tuple[str, ...], job: Job) -> Result:
        """The result, or the reason for a rejection.

        Raises:
            Refusal: too many jobs are waiting, or processes are killed.
        """
        if len(self._turns) + len(self._served) >= self._most_waiting:
            raise Busy(f"{self._most_waiting} {self._what} are waiting")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.put(client, turn)
        self._serve_next()
        try:
            await turn
        except BaseException:
            if turn.cancelled():
                self._turns.remove(client, turn)
            else:
                self._over(client)
            raise

        def over(future: asyncio.Future[Result]) -> None:
            # an exception is retrieved, even if the client has gone
            if not future.cancelled() and future.exception() is None:
                self._turns.spend(client, future.result().done.seconds)
                self._charge(client, future.result().done.seconds)
            self._over(client)

        future = loop.run_in_executor(self._threads, self.do, arguments, job)
        future.add_done_callback(over)  # not when the client disconnects: the job is still running then
        return await asyncio.shield(future)

    def close(self) -> None:
        """Ends the processes; running jobs fail."""
        with self._lock:
            self._closed = True
            for worker in (*self._running, *self._idle):
                worker.kill()
        self._threads.shutdown()
        for worker in self._idle:
            worker.close()

    def _serve_next(self) -> None:
        while (
            len(self._served) < self._most and (following := self._turns.take(busy=self._served)) is not None
        ):
            client, turn = following
            if not turn.cancelled():
                self._served.add(client)
                turn.set_result(None)

    def _over(self, client: str) -> None:
        self._served.discard(client)
        self._serve_next()

    # --- threads that wait for workers -----------------------------------------------------------

    def do(self, arguments: tuple[str, ...], job: Job) -> Result:
        """Runs a job for a thread. At most as many threads call this as there are processes."""
        for _ in range(ATTEMPTS):
            worker = self._take(arguments)
            try:
                worker.wait_until_ready()
                result = worker.call(job)
            except BaseException as error:
                with self._lock:
                    self._running.discard(worker)
                worker.close()
                if not isinstance(error, WorkerLost) or self._closed:
                    raise
                log.warning("a sandbox process %s; it is replaced", error)
                if error.cause == "job":
                    return Result(Done(field=job.field, limit=str(error), seconds=error.seconds), [])
                if error.cause == "late":
                    break
            else:
                with self._lock:
                    self._running.discard(worker)
                    self._idle.append(worker)
                return result
        raise Busy(f"the processes for {self._what} are stopped or killed; try again")

    def _take(self, arguments: tuple[str, ...]) -> _Worker:
        with self._lock:
            if self._closed:
                raise WorkerLost("ends, since the server is stopping", "outside")
            worker = next((idle for idle in reversed(self._idle) if idle.arguments == arguments), None)
            if worker is not None:
                self._idle.remove(worker)
            elif len(self._idle) + len(self._running) >= self._processes:
                self._idle.pop(0).close()
            worker = worker or _Worker(self._command, arguments)
            self._running.add(worker)
            return worker


class _Worker:
    """A process, and this side's end of its socket."""

    def __init__(self, command: tuple[str, str], arguments: tuple[str, ...]) -> None:
        self.arguments = arguments
        self._frames: Frames[Done | Picture] = Frames(Done | Picture)
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command, *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the server
                env={**environment(), "TOKENIZERS_PARALLELISM": "false"},
            )

    def wait_until_ready(self) -> None:
        """Raises JengineError if it cannot start."""
        if not self._ready:
            try:
                self._receive(START_SECONDS, 0.0)
            except WorkerLost as lost:
                if lost.cause == "outside":
                    raise
                raise JengineError(f"a sandbox process cannot start: it {lost}") from None
            self._ready = True

    def call(self, job: Job) -> Result:
        """Raises WorkerLost."""
        self._socket.settimeout(JOB_SECONDS)
        try:
            self._socket.sendall(frame(job))
        except ConnectionError:
            pass  # reading reports how it ended
        except TimeoutError:
            raise WorkerLost(f"was not done within {JOB_SECONDS} s", "late") from None
        return self._receive(JOB_SECONDS, job.seconds)

    def kill(self) -> None:
        """Thread-safe. Waiting callers get WorkerLost."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process if it still runs, and frees its resources."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, seconds: float, cpu_seconds: float) -> Result:
        self._socket.settimeout(seconds)
        pictures: list[Picture] = []
        try:
            while data := self._socket.recv(RECEIVE):
                for message in self._frames.take(data):
                    if isinstance(message, Done):
                        return Result(message, pictures)
                    pictures.append(message)
        except ConnectionError:
            pass
        except TimeoutError:
            raise WorkerLost(f"was not done within {seconds} s", "late") from None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            raise WorkerLost(f"takes more than {cpu_seconds} s of processor time", "job", cpu_seconds)
        cause: Literal["outside", "job"] = "outside" if -code in FROM_OUTSIDE else "job"
        raise WorkerLost(f"is too complex: its process {ending_of(code)}", cause, cpu_seconds)
