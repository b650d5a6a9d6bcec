"""Runs work that could crash, block or exhaust a process in disposable processes, so that it only affects one request."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jengine import InvalidArgument, JengineError, StructuredOutputs, Tokenizer, check_structure
from jengine.serving.errors import busy
from jengine.serving.sandbox_worker import CPU_SECONDS
from jengine.serving.wire import RECEIVE, Done, Frames, Job, frame

WORKERS = 2  # maximum number of processes; each starts when a job finds no idle one
START_SECONDS, JOB_SECONDS = 120.0, 30.0  # wall-clock limits; CPU_SECONDS usually ends a job earlier, unless its process is stopped
MOST_WAITING = 256  # jobs
RETRY_SECONDS = 1.0
MOST_VERDICTS = 1024  # maximum number of remembered results

log = logging.getLogger("jengine.serving")


class Lost(JengineError):
    """A worker ended in the middle of a job, or was killed."""


class Sandbox:
    """Checks grammars and renders conversations in worker processes. Belongs to one event loop.

    A client has one job at a time, so clients take turns. A thread waits for each worker, so event loop and
    workers do not block each other.

    Args:
        workers: maximum number of processes.
        module: the module that they run.
    """

    def __init__(self, workers: int = WORKERS, module: str = "jengine.serving.sandbox_worker") -> None:
        self._module = module
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        self._idle: list[_Worker] = []
        self._running: set[_Worker] = set()
        self._closed, self._lock = False, threading.Lock()  # protects these
        self._turns: dict[str, _Turn] = {}  # by client
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, InvalidArgument | None] = OrderedDict()

    async def check(self, client: str, what: object, tokenizer: Tokenizer) -> None:
        """Checks a grammar. Returns immediately if it is not a StructuredOutputs, or has been checked before.

        Raises:
            InvalidArgument: it exceeds a limit, is invalid, or crashes the process that reads it.
            Refusal: too many jobs are waiting.
        """
        if not isinstance(what, StructuredOutputs):
            return
        check_structure(what)
        arguments = json.dumps(dataclasses.asdict(what))
        key = hashlib.sha256(arguments.encode(errors="surrogatepass")).digest()
        if key not in self._verdicts:
            try:
                await self._run(client, tokenizer, Job("check", "structured_outputs", arguments))
                self._verdicts[key] = None
            except InvalidArgument as error:
                self._verdicts[key] = InvalidArgument(error.field, error.value or what, error.limit)
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(key)
        if (verdict := self._verdicts[key]) is not None:
            raise InvalidArgument(verdict.field, verdict.value, verdict.limit)

    async def render(self, client: str, messages: list[dict[str, Any]], options: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
        """Renders a conversation with the chat template in ChatOptions. Returns token ids. Raises as `check`."""
        arguments = json.dumps({"messages": messages, **options})
        return (await self._run(client, tokenizer, Job("render", "chat_template", arguments))).token_ids

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
        if self._waiting >= MOST_WAITING:
            raise busy(f"{self._waiting} grammars and templates are waiting to be checked", RETRY_SECONDS)
        assert tokenizer.folder is not None
        turn = self._turns.setdefault(client, _Turn())
        self._waiting, turn.users = self._waiting + 1, turn.users + 1
        try:
            await turn.free.acquire()
        except BaseException:
            self._leave(client, turn)
            raise

        def over(future: asyncio.Future[Done]) -> None:
            _ = future.cancelled() or future.exception()  # retrieved, even if the client has gone
            turn.free.release()
            self._leave(client, turn)

        future = asyncio.get_running_loop().run_in_executor(self._threads, self._do, tokenizer.folder, job)
        future.add_done_callback(over)  # not when the client disconnects: the job is still running then
        done = await asyncio.shield(future)
        if done.limit:
            raise InvalidArgument(done.field, done.value, done.limit)
        return done

    def _leave(self, client: str, turn: _Turn) -> None:
        self._waiting, turn.users = self._waiting - 1, turn.users - 1
        if not turn.users:
            del self._turns[client]

    # --- threads that wait for workers -----------------------------------------------------------

    def _do(self, folder: Path, job: Job) -> Done:
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
            log.warning("a request has crashed a sandbox process: %s; it is replaced", error)
            return Done(field=job.field, limit=str(error))
        with self._lock:
            self._running.discard(worker)
            self._idle.append(worker)
        return done

    def _take(self, folder: Path) -> _Worker:
        with self._lock:
            if self._closed:
                raise Lost("the server is stopping")
            worker = self._idle.pop() if self._idle else _Worker(self._module, folder)
            self._running.add(worker)
            return worker


class _Turn:
    """The queue of one client."""

    def __init__(self) -> None:
        self.free, self.users = asyncio.Semaphore(1), 0


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
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the same import path as here
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )

    def wait_until_ready(self) -> None:
        """Raises JengineError if it cannot start."""
        if not self._ready:
            try:
                self._receive(START_SECONDS)
            except Lost as lost:
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
            raise Lost(f"was not done within {JOB_SECONDS} s") from None
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
            raise Lost(f"was not done within {seconds} s") from None
        code = self._process.wait()
        if code == -signal.SIGPROF:
            raise Lost(f"takes more than {CPU_SECONDS} s of processor time")
        how = f"exited with code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
        raise Lost(f"is too complex: its process {how}")
