"""A small HTTP server beside gRPC: /metrics for Prometheus, /healthz and /readyz for probes. Limits
connections, bytes and time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from jengine import InvalidArgument
from jengine.serving.calls.listening import listen, reason
from jengine.serving.calls.model_provider import RESTART_SECONDS
from jengine.serving.metrics.server_metrics import PrometheusMetrics

MOST_CONNECTIONS = 64
LONGEST_HEAD = 8192  # bytes
KEEP_FACTOR = 4  # metrics are kept for this many times the processor time that making them took
SECONDS = 5.0  # for a request to arrive, and for its answer to be read

log = logging.getLogger("jengine.serving")


class Page(NamedTuple):
    """A response. retry_after: seconds after which another request is worthwhile."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Beside the content's."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


MakePage = Callable[[str], Awaitable[Page]]  # maps a request's Accept header to a page
Pages = Mapping[str, MakePage]


class MetricsServer:
    """Serves pages by path, for GET and HEAD, until it is closed. Belongs to the event loop in which it is
    started.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises InvalidArgument if the port is in use, or the address does not belong to this machine."""
        try:
            listening = listen(host.strip("[]"), port)
        except OSError as wrong:
            raise InvalidArgument("metrics_port", port, f"cannot listen on {host}: {reason(wrong)}") from None
        self._server = await asyncio.start_server(self._connected, sock=listening, limit=LONGEST_HEAD)
        self.port = listening.getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= MOST_CONNECTIONS:
                async with asyncio.timeout(SECONDS):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client was slow or disconnected, or this server is closing
        finally:
            self._connections.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request, then closes the connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            await _send(
                writer, Page(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request's head is too large\n")
            )
            return
        method, _, rest = head[0].partition(" ")
        target, _, version = rest.rpartition(" ")
        if not version.startswith("HTTP/1."):
            page = Page(HTTPStatus.BAD_REQUEST, b"this port supports HTTP/1.1\n")
        elif (handler := self._pages.get(target.partition("?")[0])) is None:
            page = Page(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._pages)}\n".encode())
        elif method not in ("GET", "HEAD"):
            page = Page(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n")
        else:
            accept = [
                line.partition(":")[2].strip() for line in head[1:] if line.lower().startswith("accept:")
            ]
            page = await _make(handler, ", ".join(accept))
        await _send(writer, page, body=method != "HEAD")


async def _make(handler: MakePage, accept: str) -> Page:
    try:
        return await handler(accept)
    except Exception:
        log.exception("a page could not be created")
        return Page(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal server error; see the log\n")


async def _send(writer: asyncio.StreamWriter, page: Page, body: bool = True) -> None:
    more = "".join(f"{name}: {value}\r\n" for name, value in page.headers.items())
    head = (
        f"HTTP/1.1 {page.status.value} {page.status.phrase}\r\nContent-Type: {page.content_type}\r\n{more}"
        f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + (page.body if body else b""))
    await writer.drain()
    with contextlib.suppress(NotImplementedError):
        writer.write_eof()


class Recent:
    """A text that takes time to make. Concurrent requests share one, and it is kept for KEEP_FACTOR times the
    processor time that it took. So its cost is bounded, however often it is requested.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._until = 0.0  # monotonic seconds
        self._text: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        if self._text is None or (self._text.done() and time.monotonic() >= self._until):
            self._until = 0.0  # a failure is not kept
            self._text = asyncio.create_task(asyncio.to_thread(self._timed))
        return await asyncio.shield(self._text)

    def _timed(self) -> bytes:
        began = time.thread_time()
        text = self._make()
        self._until = time.monotonic() + KEEP_FACTOR * (time.thread_time() - began)
        return text


# --- pages ------------------------------------------------------------------------------------------


def pages_of(
    metrics: PrometheusMetrics,
    why_not_ready: Callable[[], str | None],
    retry_seconds: Callable[[], float] = lambda: RESTART_SECONDS,
) -> Pages:
    """The pages of a server.

    Args:
        why_not_ready: returns None if the model answers.
        retry_seconds: returns the seconds after which it should answer.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)

    async def healthz(accept: str) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")  # the event loop is running

    async def readyz(accept: str) -> Page:
        why = why_not_ready()
        if why is None:
            return Page(HTTPStatus.OK, b"ok\n")
        return Page(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n".encode(), retry_after=math.ceil(retry_seconds())
        )

    texts: dict[str, Recent] = {}  # by content type, of which there are a few

    async def prometheus(accept: str) -> Page:
        encode, content_type = choose_encoder(accept)
        recent = texts.setdefault(content_type, Recent(lambda: encode(registry)))
        return Page(HTTPStatus.OK, await recent.text(), content_type)

    return {"/metrics": prometheus, "/healthz": healthz, "/readyz": readyz}
