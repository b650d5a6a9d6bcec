"""The HTTP port, from its start to its end: uvicorn within the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from jengine import InvalidArgument
from jengine.serving.config import ServerConfig
from jengine.serving.http.connections import Connection
from jengine.serving.listening import listen, reason

KEEP_ALIVE = 60  # seconds that a connection may wait for its next request
POLL_SECONDS = 0.01


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the application's


class HttpFront:
    """Serves an ASGI application. Belongs to one event loop.

    Args:
        option: of config, that has the port.

    Attributes:
        port: where it listens.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, option: Literal["http_port", "metrics_port"] = "http_port") -> None:
        self._app, self._config, self._option = app, config, option
        self._protocol = type("BoundedConnection", (Connection,), {"write_timeout": config.write_timeout})
        self._socket: socket.socket | None = None
        self._servers: list[tuple[_Server, asyncio.Task[None]]] = []
        self.port = 0

    async def start(self, tls: ssl.SSLContext | None) -> None:
        """Raises InvalidArgument where the port is taken, or the address is not this machine's."""
        host, port = self._config.host, getattr(self._config, self._option)
        try:
            self._socket = listen(host.strip("[]"), port)
        except OSError as wrong:
            raise InvalidArgument(self._option, port, f"cannot listen on {host}: {reason(wrong)}") from None
        self.port = self._socket.getsockname()[1]
        await self._serve(tls)

    async def reload(self, tls: ssl.SSLContext | None) -> None:
        """New connections get this; those that are open end with the answers that they wait for."""
        if self._socket is not None:
            old = self._servers[-1][0]
            await self._serve(tls)
            old.should_exit = True

    def drain(self) -> None:
        """Accept nothing new; answers that have begun go on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        for server, _ in self._servers:
            server.should_exit = True

    async def close(self, seconds: float = 0.0) -> None:
        """After this time for what is still written, end all connections."""
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
            log_level="critical",  # what goes wrong is logged by the endpoints
            access_log=False,
            proxy_headers=False,  # a client must not choose the address that its limits are counted by
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
        self._servers = [(one, its) for one, its in self._servers if not its.done()] + [(server, task)]
