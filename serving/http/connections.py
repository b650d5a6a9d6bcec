"""HTTP connections with time limits for headers that do not arrive and for responses that are not read."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # maximum time for a request's headers, from the first byte of the connection or the request

log = logging.getLogger("jengine.serving")


class Connection(H11Protocol):
    """uvicorn's connection with timers. h11 limits headers to 16 KiB.

    Attributes:
        write_timeout: seconds in which a client must read some of the waiting response.
    """

    write_timeout: ClassVar[float] = 10.0

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._head is not None:
            self._head.cancel()
            self._head = None
        elif not answering and self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self._end)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.write_timeout, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def timeout_keep_alive_handler(self) -> None:
        """Closes a connection because no request has arrived. Data that the client has not read by now is dropped."""
        self._end() if self.transport.get_write_buffer_size() else super().timeout_keep_alive_handler()

    def _stalled(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left < self._unread:
            self._unread = left
            self._stall = self.loop.call_later(self.write_timeout, self._stalled)
            return
        client = "{}:{}".format(*self.client) if self.client else "unknown"
        log.warning("slow reader: %s left an answer unread for %g s; its request is aborted", client, self.write_timeout)
        self._end()

    def _end(self) -> None:
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
