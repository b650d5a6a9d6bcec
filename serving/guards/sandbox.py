"""Runs work that could crash, block or exhaust a process in disposable processes, so that it only affects one
request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jengine import InvalidArgument, JengineError, StructuredOutputs, Tokenizer, check_structure
from jengine.serving.calls.errors import busy
from jengine.serving.guards.sandbox_worker import CPU_SECONDS
from jengine.serving.processes.turns import Turns
from jengine.serving.processes.wire import RECEIVE, Done, Frames, Job, frame

WORKERS = 2  # maximum number of processes; each starts when a job finds no idle one
# wall-clock limits; CPU_SECONDS usually ends a job earlier, unless its process is stopped
START_SECONDS, JOB_SECONDS = 120.0, 30.0
MOST_WAITING = 256  # jobs
RETRY_SECONDS = 1.0
MOST_VERDICTS = 1024  # maximum number of remembered results
ATTEMPTS = 3  # processes that may be killed from outside before a job is given up
# signals that no job causes
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

log = logging.getLogger("jengine.serving")


class Lost(JengineError):
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


class Verdict(NamedTuple):
    """The result of a check: None if the grammar is good, and the processor seconds that it took."""

    error: InvalidArgument | None
    seconds: float


class Sandbox:
    """Checks grammars and renders conversations in worker processes. Belongs to one event loop.

    A client has one job at a time, and clients take turns. A thread waits for each worker, so event loop and
    workers do not block each other.

    Args:
        workers: maximum number of processes.
        module: the module that they run.
        charge: called with the client and the processor seconds of each of its jobs, in the context of the
            request.
    """

    def __init__(
        self,
        workers: int = WORKERS,
        module: str = "jengine.serving.guards.sandbox_worker",
        charge: Callable[[str, float], None] = lambda client, seconds: None,
    ) -> None:
        self._module, self._workers, self._charge = module, workers, charge
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._idle: list[_Worker] = []
        self._running: set[_Worker] = set()
        self._closed, self._lock = False, threading.Lock()  # protects these
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._served: set[str] = set()  # clients whose jobs run
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    async def check(self, client: str, what: object, tokenizer: Tokenizer) -> None:
        """Checks a grammar. Returns immediately if it is not a StructuredOutputs, or has been checked before.

        A known grammar is charged what its check took, since the engine compiles it once more.

        Raises:
            InvalidArgument: it exceeds a limit, is invalid, or crashes the process that reads it.
            Refusal: too many jobs are waiting, or processes are killed.
        """
        if not isinstance(what, StructuredOutputs):
            return
        check_structure(what)
        arguments = json.dumps({field.name: getattr(what, field.name) for field in dataclasses.fields(what)})
        key = hashlib.sha256(arguments.encode(errors="surrogatepass")).digest()
        if (verdict := self._verdicts.get(key)) is None:
            done = await self._run(client, tokenizer, Job("check", "structured_outputs", arguments))
            verdict = Verdict(
                InvalidArgument(done.field, done.value or what, done.limit) if done.limit else None,
                done.seconds,
            )
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        else:
            self._charge(client, verdict.seconds)
            self._verdicts.move_to_end(key)
        if (error := verdict.error) is not None:
            raise InvalidArgument(error.field, error.value, error.limit)

    async def render(
        self, client: str, messages: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer
    ) -> list[int]:
        """Renders a conversation with the chat template in ChatOptions. Returns token ids. Raises as
        `check`.
        """
        arguments = json.dumps({"messages": messages, **options})
        done = await self._run(client, tokenizer, Job("render", "chat_template", arguments))
        if done.limit:
            raise InvalidArgument(done.field, done.value, done.limit)
        return done.token_ids

    def close(self) -> None:
        """Ends the workers; running jobs fail."""
        with self._lock:
            self._closed = True
            for worker in (*self._running, *self._idle):
                worker.kill()
        self._threads.shutdown()
        for worker in self._idle:
            worker.close()

    async def _run(self, client: str, tokenizer: Tokenizer, job: Job) -> Done:
        if len(self._turns) + len(self._served) >= MOST_WAITING:
            raise busy(f"{MOST_WAITING} grammars and templates are waiting to be checked", RETRY_SECONDS)
        assert tokenizer.folder is not None
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

        def over(future: asyncio.Future[Done]) -> None:
            # an exception is retrieved, even if the client has gone
            if not future.cancelled() and future.exception() is None:
                self._turns.spend(client, future.result().seconds)
                self._charge(client, future.result().seconds)
            self._over(client)

        future = loop.run_in_executor(self._threads, self._do, tokenizer.folder, job)
        future.add_done_callback(over)  # not when the client disconnects: the job is still running then
        return await asyncio.shield(future)

    def _serve_next(self) -> None:
        while (
            len(self._served) < self._workers
            and (following := self._turns.take(busy=self._served)) is not None
        ):
            client, turn = following
            if not turn.cancelled():
                self._served.add(client)
                turn.set_result(None)

    def _over(self, client: str) -> None:
        self._served.discard(client)
        self._serve_next()

    # --- threads that wait for workers -----------------------------------------------------------

    def _do(self, folder: Path, job: Job) -> Done:
        for _ in range(ATTEMPTS):
            worker = self._take(folder)
            try:
                worker.wait_until_ready()
                done = worker.call(job)
            except BaseException as error:
                with self._lock:
                    self._running.discard(worker)
                worker.close()
                if not isinstance(error, Lost) or self._closed:
                    raise
                log.warning("a sandbox process %s; it is replaced", error)
                if error.cause == "job":
                    return Done(field=job.field, limit=str(error), seconds=error.seconds)
                if error.cause == "late":
                    break
            else:
                with self._lock:
                    self._running.discard(worker)
                    self._idle.append(worker)
                return done
        raise busy(
            "the processes that check grammars and templates are stopped or killed; try again", RETRY_SECONDS
        )

    def _take(self, folder: Path) -> _Worker:
        with self._lock:
            if self._closed:
                raise Lost("ends, since the server is stopping", "outside")
            worker = self._idle.pop() if self._idle else _Worker(self._module, folder)
            self._running.add(worker)
            return worker


class _Worker:
    """A process, and this side's end of its socket."""

    def __init__(self, module: str, folder: Path) -> None:
        self._frames: Frames[Done] = Frames(Done)
        self._ready = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the server
                env={
                    **os.environ,
                    # the same import path as here
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )

    def wait_until_ready(self) -> None:
        """Raises JengineError if it cannot start."""
        if not self._ready:
            try:
                self._receive(START_SECONDS)
            except Lost as lost:
                if lost.cause == "outside":
                    raise
                raise JengineError(f"a sandbox process cannot start: it {lost}") from None
            self._ready = True

    def call(self, job: Job) -> Done:
        """Raises Lost."""
        self._socket.settimeout(JOB_SECONDS)
        try:
            self._socket.sendall(frame(job))
        except ConnectionError:
            pass  # reading reports how it ended
        except TimeoutError:
            raise Lost(f"was not done within {JOB_SECONDS} s", "late") from None
        return self._receive(JOB_SECONDS)

    def kill(self) -> None:
        """Thread-safe. Waiting callers get Lost."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process if it still runs, and frees its resources."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self, seconds: float) -> Done:
        self._socket.settimeout(seconds)
        try:
            while data := self._socket.recv(RECEIVE):
                if messages := self._frames.take(data):
                    return messages[0]
        except ConnectionError:
            pass
        except TimeoutError:
            raise Lost(f"was not done within {seconds} s", "late") from None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            raise Lost(f"takes more than {CPU_SECONDS} s of processor time", "job", CPU_SECONDS)
        how = (
            f"exited with code {code}"
            if code >= 0
            else f"was ended by signal {-code} ({signal.strsignal(-code)})"
        )
        raise Lost(
            f"is too complex: its process {how}", "outside" if -code in FROM_OUTSIDE else "job", CPU_SECONDS
        )
