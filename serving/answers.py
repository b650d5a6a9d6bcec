"""What all services do with a request: queue it, take its outputs, write them to a client who may not read."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jengine import RequestHandle, RequestOutput
from jengine.serving.admission import Place
from jengine.serving.overload import SlowReader
from jengine.serving.pace import Pace
from jengine.serving.tracking import TrackedRequest

log = logging.getLogger("jengine.serving")


class Answer:
    """The outputs of a request that has been queued, tracked. Left, the request has ended, or is aborted.

    Args:
        pace: of streams; None for a request that gets one output.
    """

    def __init__(self, handle: RequestHandle, request: TrackedRequest, pace: Pace | None = None) -> None:
        self._handle, self._request, self._pace = handle, request, pace
        self._counted: AbstractContextManager[None] = nullcontext() if pace is None else pace.stream()
        request.queued(handle.output)

    def __enter__(self) -> Answer:
        self._counted.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._counted.__exit__(None, None, None)
        if self._pace is not None:
            self._pace.writing.pop(self, None)
        self._handle.close()
        self._request.over()

    async def next(self) -> RequestOutput:
        """The next output, which is then written; after one that is finished there is none.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        if self._pace is not None:
            self._pace.writing.pop(self, None)
        output = await anext(self._handle)
        output.request_id = self._request.request_id
        self._request.tokens(output)
        if self._pace is not None:
            self._handle.pause(self._pace.seconds)
            self._pace.writing[self] = time.monotonic()
        return output


class PatientWriter:
    """Writes a stream's messages, each of which the client must take within a time.

    A write waits for HTTP/2's flow control. Where it has waited too long, `give_up` is called, which frees what the request holds; the
    write itself cannot be taken back, so the error is raised, and reaches the client, when he reads on or goes. Meanwhile this
    stream holds one message and what the transport buffers.
    """

    def __init__(
        self, write: Callable[[Any], Awaitable[object]], peer: Callable[[], str], seconds: float, give_up: Callable[[], object]
    ) -> None:
        self._write, self._peer, self._seconds, self._give_up = write, peer, seconds, give_up
        self._call_later = asyncio.get_running_loop().call_later
        self._stalled = False

    async def write(self, message: Any) -> None:
        """Raises SlowReader when the client did not read in time."""
        timer = self._call_later(self._seconds, self._stall)
        try:
            await self._write(message)
        finally:
            timer.cancel()
        if self._stalled:
            raise SlowReader(f"slow reader: a message was not read within {self._seconds} s")

    def _stall(self) -> None:
        self._stalled = True
        log.warning("slow reader: %s left a message unread for %g s; what it had asked for is aborted", self._peer(), self._seconds)
        self._give_up()


def give_up(handle: RequestHandle, place: Place) -> None:
    """Free what a request holds while its handler is stuck in a write."""
    place.release()
    handle.abort()


def new_id() -> str:
    """Not AsyncLLM's own: these can be guessed, and a client who took the next one would block somebody else."""
    return uuid.uuid4().hex
