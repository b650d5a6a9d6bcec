"""HTTP connections with time limits for headers that do not arrive and for responses that are not read."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from http import HTTPStatus
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from jengine.serving.http.errors import OPENAI, error_with_status

# maximum time for a request's headers, from the first byte of the connection or the request
HEAD_SECONDS = 10.0

log = logging.getLogger("jengine.serving")
REFUSED_SECONDS = 2.0  # maximum time for a first request on a connection beyond the limits


class Quota:
    """Counts open connections, in total and by address.

    Attributes:
        total: of all addresses.
        per_address: of one address.
    """

    def __init__(self, total: int, per_address: int) -> None:
        self.total, self.per_address = total, per_address
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> tuple[HTTPStatus, str] | None:
        """Counts a connection, which `leave` must follow. Beyond a limit, returns a status and a reason
        instead.
        """
        if self._open[address] >= self.per_address:
            why = f"this client has {self.per_address} connections, the maximum (max_connections_per_client)"
            return HTTPStatus.TOO_MANY_REQUESTS, why
        if self._open.total() >= self.total:
            return (
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server has {self.total} connections, the maximum (max_connections)",
            )
        self._open[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class Connection(H11Protocol):
    """uvicorn's connection with timers. h11 limits headers to 16 KiB.

    Attributes:
        write_timeout: seconds in which a client must read some of the waiting response.
        quota: of all connections of the port.
    """

    write_timeout: ClassVar[float] = 10.0
    quota: ClassVar[Quota]

    _address = ""
    _refused: tuple[HTTPStatus, str] | None = None

    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = str((transport.get_extra_info("peername") or ("",))[0])
        self._refused = self.quota.enter(self._address)
        self._head = self.loop.call_later(REFUSED_SECONDS if self._refused else HEAD_SECONDS, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        if self._refused is None:
            self.quota.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            self._refuse(*self._refused)
            return
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
        """Closes a connection because no request has arrived. Data that the client has not read by now is
        dropped.
        """
        self._end() if self.transport.get_write_buffer_size() else super().timeout_keep_alive_handler()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        """Answers the first request with an error, and closes. Clients do not expect an answer before they
        have sent a request.
        """
        if self.transport.is_closing():
            return
        body = b"".join(OPENAI.body(error_with_status(status, why)))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length:"
            f" {len(body)}\r\n"
        )
        self.transport.write(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _stalled(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left < self._unread:
            self._unread = left
            self._stall = self.loop.call_later(self.write_timeout, self._stalled)
            return
        client = "{}:{}".format(*self.client) if self.client else "unknown"
        log.warning(
            "slow reader: %s left an answer unread for %g s; its request is aborted",
            client,
            self.write_timeout,
        )
        self._end()

    def _end(self) -> None:
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()
