"""Handling of a request in all services: queue it, receive its outputs, write them to a client that may not
read them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import grpc

from jengine import RequestHandle, RequestOutput
from jengine.serving.calls.call import SlowReader
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import RESTART_SECONDS
from jengine.serving.guards.admission import Place
from jengine.serving.requests.pace import Pace
from jengine.serving.requests.tracking import TrackedRequest

# Aborts that an API shows as the end of an answer: only those that its client or an administrator has asked
# for (`Abort`, `Pause`), or also those by the server.
Aborts = Literal["none", "asked for", "all"]
CODES = {  # by the reason for an abort
    "timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "rejected": grpc.StatusCode.DEADLINE_EXCEEDED,  # its targets for latency cannot be met
    "shutdown": grpc.StatusCode.UNAVAILABLE,
    "unloaded": grpc.StatusCode.NOT_FOUND,  # its adapter
}
log = logging.getLogger("jengine.serving")


def check_ending(output: RequestOutput, aborts: Aborts) -> None:
    """Raises Refusal if a completion has ended with an error, or was aborted in a way that the API does not
    show.
    """
    for completion in output.outputs:
        ended, why = completion.finish_reason, completion.stop_reason
        shown = aborts == "all" or (aborts == "asked for" and why not in CODES)
        if ended == "error" or (ended == "abort" and not shown):
            code = CODES.get(str(why), grpc.StatusCode.INTERNAL)
            raise Refusal(
                code,
                "the request ended without an answer" + ("" if why is None else f": {why}"),
                cause=ended,
                retry_seconds=RESTART_SECONDS if code is grpc.StatusCode.UNAVAILABLE else None,
            )


class Answer:
    """The outputs of a queued and tracked request. On exit, an unfinished request is aborted.

    Args:
        pace: of streams; None for a request that gets one output.
        aborts: those that the API shows.
    """

    def __init__(
        self,
        handle: RequestHandle,
        request: TrackedRequest,
        pace: Pace | None = None,
        aborts: Aborts = "none",
    ) -> None:
        self._handle, self._request, self._pace, self._aborts = handle, request, pace, aborts
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
        """Returns the next output, which the caller must write. There is none after a finished one.

        Raises:
            EngineDead: the engine has failed, or was closed.
            Refusal: the request has ended without an answer.
        """
        if self._pace is not None:
            self._pace.writing.pop(self, None)
        output = await anext(self._handle)
        output.request_id = self._request.request_id
        self._request.tokens(output)
        check_ending(output, self._aborts)
        if self._pace is not None:
            now = time.monotonic()
            self._handle.pause(self._pace.next_beat(now))
            self._pace.writing[self] = now
        return output


class PatientWriter:
    """Writes a stream's messages. The client must read each within a time limit.

    A write waits for HTTP/2's flow control. If it waits too long, `abandon` is called, which frees the
    request's resources. The write cannot be cancelled, so the error is raised, and reaches the client, only
    when the client reads on or disconnects. Until then the stream holds one message and the transport's
    buffers.
    """

    def __init__(
        self,
        write: Callable[[Any], Awaitable[object]],
        peer: Callable[[], str],
        seconds: float,
        abandon: Callable[[], object],
    ) -> None:
        self._write, self._peer, self._seconds, self._abandon = write, peer, seconds, abandon
        self._call_later = asyncio.get_running_loop().call_later
        self._stalled = False

    async def write(self, message: Any) -> None:
        """Raises SlowReader if the client did not read in time."""
        timer = self._call_later(self._seconds, self._stall)
        try:
            await self._write(message)
        finally:
            timer.cancel()
        if self._stalled:
            raise SlowReader(f"slow reader: a message was not read within {self._seconds} s")

    def _stall(self) -> None:
        self._stalled = True
        log.warning(
            "slow reader: %s left a message unread for %g s; its request is aborted",
            self._peer(),
            self._seconds,
        )
        self._abandon()


def abandon(handle: RequestHandle, place: Place) -> None:
    """Frees a request's resources while its handler is blocked in a write."""
    place.release()
    handle.abort()
