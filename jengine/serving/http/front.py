"""An HTTP port from start to end: uvicorn in the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jengine.serving.calls.listening import PortOption, listen
from jengine.serving.config import ServerConfig
from jengine.serving.http.connections import Connection, Quota
from jengine.serving.metrics.metrics_server import MakePage, Pages

KEEP_ALIVE = 60  # seconds that an idle connection is kept
POLL_SECONDS = 0.01

log = logging.getLogger("jengine.serving")


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
            page = await make(request.headers.get("accept", ""))
        except Exception:
            log.exception("a page could not be created")
            return PlainTextResponse("internal server error; see the log\n", 500)
        return Response(page.body, page.status, page.headers, page.content_type)

    return handle
