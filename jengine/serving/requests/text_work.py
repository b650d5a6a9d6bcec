"""Processes long text (tokenizing, chat templates) in threads, so that the event loop continues. Clients take
turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from jengine.serving.calls.call import Busy

# minimum bytes for using a thread: the work takes milliseconds, and would delay other requests
LONG_TEXT = 10_000
THREADS = 2  # for all clients; they compete with the event loop and the engine for CPU time
MAX_BYTES = 2**28  # maximum total size of waiting and running requests
MAX_CLIENT_BYTES = 2**26  # the same per client
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class _Client:
    bytes: int = 0  # of waiting and running requests
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class TextWork:
    """Runs at most THREADS tasks at a time, and one per client, so that clients take turns. Belongs to one
    event loop.

    Args:
        waits: whether tokenizing small texts, too, takes a thread.

    A thread cannot be interrupted. If a client disconnects, its task keeps its place until it is done. So the
    number of busy threads is bounded, whatever clients cancel.
    """

    def __init__(self, waits: Callable[[], bool] = lambda: False) -> None:
        self._waits = waits
        self._clients: dict[str, _Client] = {}
        self._threads = asyncio.Semaphore(THREADS)
        self._bytes = 0

    async def run[T](self, client: str, size: int, work: Callable[[], T]) -> T:
        """Runs `work` on `size` bytes and returns its result; runs it directly if `size` is small.

        Raises:
            Busy: too much work is waiting.
        """
        if size < LONG_TEXT and not self._waits():
            return work()
        mine = self._clients.get(client) or _Client()
        if mine.bytes + size > MAX_CLIENT_BYTES or self._bytes + size > MAX_BYTES:
            raise Busy(
                f"{mine.bytes} bytes of this client's text wait to be processed, {self._bytes} in all",
                RETRY_SECONDS,
                "text_work",
            )
        self._clients[client] = mine
        mine.bytes += size
        self._bytes += size
        turns: list[asyncio.Semaphore] = []
        try:
            for turn in (mine.turn, self._threads):
                await turn.acquire()
                turns.append(turn)
        except BaseException:
            self._done(client, size, turns)
            raise
        future = asyncio.get_running_loop().run_in_executor(None, work)

        def done(future: asyncio.Future[T]) -> None:
            _ = future.cancelled() or future.exception()  # retrieved, even if the client has gone
            self._done(client, size, turns)

        future.add_done_callback(done)
        return await asyncio.shield(future)

    def _done(self, client: str, size: int, turns: list[asyncio.Semaphore]) -> None:
        for turn in turns:
            turn.release()
        mine = self._clients[client]
        mine.bytes -= size
        self._bytes -= size
        if not mine.bytes:
            del self._clients[client]
