"""Handling of a request in all services: queue it, receive its outputs, write them to a client that may not
read them, at a pace that many streams allow.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import grpc

from jengine import RequestHandle, RequestOutput
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import RESTART_SECONDS
from jengine.serving.requests.tracking import TrackedRequest
from jengine.spi import Readers

MESSAGE_SECONDS = 100e-6  # the event loop's time for a message
# share of all cores' time for the messages of all streams, since the engine may need the cores
CORES_SHARE = 0.04
LOOP_SHARE = 0.5  # maximum share of the event loop's time
LONGEST = 0.1  # seconds
WAITING = 0.5  # seconds after which a write counts as waiting for its client
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


class Pace:
    """Bounds the share of CPU time used by streams.

    A message costs the server and its client much more than a token in it. With few streams, each token is
    sent immediately. With many, a stream waits between two messages, and tokens that arrive meanwhile are
    sent together. The first and the last message of a stream are never delayed. All streams wait for the same
    beats, since messages written together wake the server's and the client's processes once, not once each.

    Args:
        cores: number of cores that this process may use; None: detected.

    Attributes:
        writing: streams that are writing a message, with the start times (time.monotonic()).
    """

    def __init__(self, cores: int | None = None) -> None:
        self._streams, self._beat = 0, 0.0
        self.writing: dict[object, float] = {}
        self._share = min(CORES_SHARE * (cores or _cores()), LOOP_SHARE)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context that counts one more stream."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def readers(self) -> Readers:
        """How clients currently read."""
        now = time.monotonic()
        waits = [now - since for since in self.writing.values() if now - since >= WAITING]
        return Readers(streams=self._streams, waiting=len(waits), longest=max(waits, default=0.0))

    def next_beat(self, now: float) -> float:
        """When a stream that writes now may write again, on the clock of time.monotonic()."""
        if now >= self._beat:
            self._beat = now + self.seconds
        return self._beat

    @property
    def seconds(self) -> float:
        """Seconds between two beats."""
        return min(self._streams * MESSAGE_SECONDS / self._share, LONGEST)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

    Attributes:
        request: the tracked request.
    """

    def __init__(
        self,
        handle: RequestHandle,
        request: TrackedRequest,
        pace: Pace | None = None,
        aborts: Aborts = "none",
    ) -> None:
        self._handle, self.request, self._pace, self._aborts = handle, request, pace, aborts
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
        self.request.over()

    @property
    def output(self) -> RequestOutput:
        """Everything so far."""
        return self._handle.output

    def abandon(self) -> None:
        """Frees the request's resources while its handler is blocked in a write."""
        if self.request.place is not None:
            self.request.place.release()
        self._handle.abort()

    async def next(self) -> RequestOutput:
        """Returns the next output, which the caller must write. There is none after a finished one.

        Raises:
            EngineDead: the engine has failed, or was closed.
            Refusal: the request has ended without an answer.
        """
        if self._pace is not None:
            self._pace.writing.pop(self, None)
        output = await anext(self._handle)
        output.request_id = self.request.request_id
        self.request.tokens(output)
        check_ending(output, self._aborts)
        if self._pace is not None:
            now = time.monotonic()
            self._handle.pause(self._pace.next_beat(now))
            self._pace.writing[self] = now
        return output


class PatientWriter:
    """Writes an answer's messages to a gRPC stream. The client must read each within a time limit.

    A write waits for HTTP/2's flow control. If it waits too long, the answer is abandoned. The write cannot
    be cancelled, so the error is raised, and reaches the client, only when the client reads on or
    disconnects. Until then the stream holds one message and the transport's buffers.
    """

    def __init__(self, context: grpc.aio.ServicerContext, seconds: float, answer: Answer) -> None:
        self._context, self._seconds, self._answer = context, seconds, answer
        self._call_later = asyncio.get_running_loop().call_later
        self._stalled = False

    async def write(self, message: Any) -> None:
        """Raises Refusal if the client did not read in time."""
        timer = self._call_later(self._seconds, self._stall)
        try:
            await self._context.write(message)
        finally:
            timer.cancel()
        if self._stalled:
            limit = f"slow reader: a message was not read within {self._seconds} s"
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, limit, cause="slow_reader")

    def _stall(self) -> None:
        self._stalled = True
        log.warning(
            "slow reader: %s left a message unread for %g s; its request is aborted",
            self._context.peer(),
            self._seconds,
        )
        self._answer.abandon()
