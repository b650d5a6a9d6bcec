"""An HTTP port from start to end: uvicorn in the server's event loop, with limits on connections, on the time
for headers and for responses that are not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import ClassVar, Literal

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.http.errors import OPENAI, STATUSES, HttpError
from jengine.serving.metrics.server_metrics import MakePage, Pages

PortOption = Literal["port", "grpc_port", "metrics_port"]


def listen(config: ServerConfig, option: PortOption) -> socket.socket:
    """Listens on the first address of config's host, like gRPC for both families on `::`.

    Args:
        option: the option of config with the port.

    Raises:
        InvalidArgument: the port is in use, or the address does not belong to this machine.
    """
    host, port = config.host, getattr(config, option)
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        both = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both)
    except OSError as wrong:
        raise InvalidArgument(option, port, f"cannot listen on {host}: {_reason(wrong)}") from None


def _reason(error: OSError) -> str:
    """The error's text without the address that Python adds; the resolver's text for unknown names."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)


# maximum time for a request's headers, from the first byte of the connection or the request
HEAD_SECONDS = 10.0
REFUSED_SECONDS = 2.0  # maximum time for a first request on a connection beyond the limits
KEEP_ALIVE = 60  # seconds that an idle connection is kept
POLL_SECONDS = 0.01
log = logging.getLogger("jengine.serving")


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
        body = b"".join(OPENAI.body(HttpError(status, dict(STATUSES.values())[status], why)))
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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the application handles signals


class HttpFront:
    """Serves an ASGI application. Belongs to one event loop.

    Args:
        option: the option of config with the port.
        listening: the socket of this port, if it listens already.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        option: PortOption = "port",
        listening: socket.socket | None = None,
    ) -> None:
        self._app, self._config, self._option, self._socket = app, config, option, listening
        quota = Quota(config.max_connections, config.max_connections_per_client)
        self._protocol = type(
            "BoundedConnection", (Connection,), {"write_timeout": config.write_timeout, "quota": quota}
        )
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self.port = 0

    async def start(self, tls: ssl.SSLContext | None) -> None:
        """Raises InvalidArgument if the port is in use, or the address does not belong to this machine."""
        self._socket = self._socket or listen(self._config, self._option)
        # Shared by its duplicates: one that blocks would let accept() in another stop the event loop.
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        await self._serve(tls)

    async def reload(self, tls: ssl.SSLContext | None) -> None:
        """Uses this context for new connections. Open ones are closed after the responses that they wait
        for.
        """
        if self._socket is not None:
            old = self._servers[-1][0]
            await self._serve(tls)
            old.should_exit = True

    def drain(self) -> None:
        """Stops accepting connections; responses in progress continue."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for server, _ in self._servers:
            server.should_exit = True

    async def close(self, seconds: float = 0.0) -> None:
        """Closes all connections, after at most this time for responses in progress."""
        self.drain()
        tasks = [task for _, task in self._servers]
        if tasks and seconds:
            await asyncio.wait(tasks, timeout=seconds)
        for server, task in self._servers:
            server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await task

    async def _serve(self, tls: ssl.SSLContext | None) -> None:
        assert self._socket is not None
        config = uvicorn.Config(
            self._app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # endpoints log errors themselves
            access_log=False,
            proxy_headers=False,  # clients must not choose the address that their limits are based on
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        server = _Server(config)
        task = asyncio.get_running_loop().create_task(server.serve([self._socket.dup()]))
        while not server.started and not task.done():
            await asyncio.sleep(POLL_SECONDS)
        if task.done():
            task.result()
        self._servers = [(old, serving) for old, serving in self._servers if not serving.done()] + [
            (server, task)
        ]


def page_routes(pages: Pages) -> list[Route]:
    """Routes of pages by path, for GET and HEAD."""
    return [Route(path, _handler(make), methods=["GET"]) for path, make in pages.items()]


def _handler(make: MakePage) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await make(request.headers.get("accept", ""))
        except Exception:
            log.exception("a page could not be created")
            return PlainTextResponse("internal server error; see the log\n", 500)

    return handle
