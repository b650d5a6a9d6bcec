"""What both services do with a request: queue it, take its outputs, write them to a client who may not read."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from jengine import AsyncLLM, InvalidArgument, RequestOutput
from jengine.serving.admission import Place
from jengine.serving.errors import Refusal
from jengine.serving.tracking import TrackedRequest

log = logging.getLogger("jengine.serving")

LONG_TEXT = 10_000  # bytes from which work on text is left to a thread: it takes some 10 ms, and everybody else would wait

Outputs = AsyncGenerator[RequestOutput]
_aborts: set[asyncio.Task[bool]] = set()  # on their way; the event loop alone would not keep them


class Answer:
    """A request's outputs. Entered when it has been checked and queued; left, it has ended, or is aborted.

    Args:
        request_id: as the engine knows it; clients see the tracked request's.

    Raises:
        InvalidArgument, EngineDead: on entering, as AsyncLLM.generate.
    """

    def __init__(self, llm: AsyncLLM, request_id: str, outputs: Outputs, request: TrackedRequest) -> None:
        self._llm, self._request_id, self._outputs, self._request = llm, request_id, outputs, request

    async def __aenter__(self) -> Answer:
        self._first = asyncio.ensure_future(anext(self._outputs))
        try:
            await asyncio.sleep(0)  # in this turn of the event loop it is queued, or refused
            if self._first.done():
                self._first.result()
        except InvalidArgument as wrong:
            await self._close()
            raise wrong if wrong.field != "request_id" else InvalidArgument(wrong.field, self._request.request_id, wrong.limit) from None
        except BaseException:
            await self._close()
            raise
        self._taken = False
        self._request.queued(self._llm.find(self._request_id))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()
        self._request.over()

    async def next(self) -> RequestOutput:
        """The next output; after one that is finished there is none.

        Raises:
            EngineDead: the engine has failed, or was closed.
        """
        if self._taken:
            output = await anext(self._outputs)
        else:
            output, self._taken = await self._first, True
        output.request_id = self._request.request_id
        self._request.tokens(output)
        return output

    async def _close(self) -> None:
        if not self._first.done():
            self._first.cancel()
            await asyncio.wait([self._first])
        await self._outputs.aclose()


class PatientWriter:
    """Writes a stream's messages, each of which the client must take within a time.

    A write waits for HTTP/2's flow control. Where it has waited too long, `give_up` is called, which frees what the request holds; the
    write itself cannot be taken back, so the error is raised, and reaches the client, when he reads on or goes. Meanwhile this
    stream holds one message and what the transport buffers.
    """

    def __init__(self, context: grpc.aio.ServicerContext, seconds: float, give_up: Callable[[], object]) -> None:
        self._write, self._peer, self._seconds, self._give_up = context.write, context.peer, seconds, give_up
        self._call_later = asyncio.get_running_loop().call_later
        self._stalled = False

    async def write(self, message: Any) -> None:
        """Raises Refusal when the client did not read in time."""
        timer = self._call_later(self._seconds, self._stall)
        try:
            await self._write(message)
        finally:
            timer.cancel()
        if self._stalled:
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"slow reader: a message was not read within {self._seconds} s", cause="slow_reader"
            )

    def _stall(self) -> None:
        self._stalled = True
        log.warning("slow reader: %s left a message unread for %g s; what it had asked for is aborted", self._peer(), self._seconds)
        self._give_up()


def give_up(llm: AsyncLLM, request_id: str, place: Place) -> None:
    """Free what a request holds while its handler is stuck in a write."""
    place.release()
    task = asyncio.ensure_future(llm.abort(request_id))
    _aborts.add(task)
    task.add_done_callback(_aborts.discard)


def new_id() -> str:
    """Not AsyncLLM's own: these can be guessed, and a client who took the next one would block somebody else."""
    return uuid.uuid4().hex


async def in_thread_if_long[T](size: int, work: Callable[[], T]) -> T:
    """Work on so many bytes of text; the tokenizer releases the interpreter's lock."""
    return work() if size < LONG_TEXT else await asyncio.get_running_loop().run_in_executor(None, work)


async def tokenized(llm: AsyncLLM, text: str) -> str | list[int]:
    """A text, or its token ids where it is long."""
    return text if len(text) < LONG_TEXT else await in_thread_if_long(len(text), lambda: llm.tokenizer.encode(text))
