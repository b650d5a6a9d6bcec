"""Metrics and probes over plain HTTP, and limits of the port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus

import pytest

from jengine import EngineDead, InvalidArgument, Load
from jengine.serving.metrics import metrics_server
from jengine.serving.metrics.metrics_server import (
    LONGEST_HEAD,
    MOST_CONNECTIONS,
    MetricsServer,
    Page,
    pages_of,
)
from jengine.serving.metrics.server_metrics import PrometheusMetrics


def no_engine() -> Load:
    raise EngineDead("starting")


@asynccontextmanager
async def serving(why: str | None = None, host: str = "127.0.0.1") -> AsyncIterator[MetricsServer]:
    server = MetricsServer(pages_of(PrometheusMetrics("tiny", no_engine, lambda: 0), lambda: why))
    await server.start(host, 0)
    try:
        yield server
    finally:
        await server.close()


async def ask(server: MetricsServer, request: bytes, host: str = "127.0.0.1") -> tuple[int, bytes]:
    """The response's status and body; 0 if there is none."""
    reader, writer = await asyncio.open_connection(host, server.port)
    try:
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return 0, b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head:
        return 0, b""
    assert b"\r\nConnection: close" in head
    return int(head.split()[1]), body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_paths() -> None:
    async def run() -> None:
        async with serving() as server:
            for path, status, text in (
                ("/metrics", 200, b'jengine:engine_up{model_name="tiny"} 0.0'),
                ("/metrics?name[]=x", 200, b"jengine:engine_up"),
                ("/healthz", 200, b"ok\n"),
                ("/readyz", 200, b"ok\n"),
                ("/", 404, b"/metrics, /healthz, /readyz"),
                ("/metrics/x", 404, b""),
                ("/healthz/", 404, b""),
            ):
                got, body = await ask(server, get(path))
                assert (got, text in body) == (status, True), (path, got, body)
            assert await ask(server, get("/healthz", "HEAD")) == (200, b"")
            assert (await ask(server, get("/metrics", "POST")))[0] == 405
            status, body = await ask(
                server, b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
            )
            assert status == 200 and body.endswith(b"# EOF\n")

    asyncio.run(run())


def test_not_ready_says_why() -> None:
    async def run() -> None:
        async with serving("starting: the engine is not ready yet") as server:
            assert await ask(server, get("/readyz")) == (503, b"starting: the engine is not ready yet\n")
            assert await ask(server, get("/healthz")) == (200, b"ok\n")

    asyncio.run(run())


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\xff\xfe\x00 \x01\r\n\r\n", 400),
        (b"GET /" + b"x" * 2 * LONGEST_HEAD + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * LONGEST_HEAD, 431),
    ],
)
def test_garbage(request_: bytes, status: int) -> None:
    async def run() -> None:
        async with serving() as server:
            assert (await ask(server, request_))[0] in (status, 0)  # 0: closed with what was not read
            assert (await ask(server, get("/healthz")))[0] == 200

    asyncio.run(run())


def test_connections_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SECONDS", 0.5)

    async def run() -> None:
        async with serving() as server, AsyncExitStack() as stack:
            idle = []
            for _ in range(MOST_CONNECTIONS):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                stack.callback(writer.close)
                writer.write(b"GET /metr")
                idle.append(reader)
            assert await ask(server, get("/healthz")) == (0, b""), "one too many"
            for reader in idle:
                assert await asyncio.wait_for(reader.read(), 20) == b"", "closed when its time is up"
            assert (await ask(server, get("/healthz")))[0] == 200

    asyncio.run(run())


def test_a_scrape_that_fails_is_an_answer() -> None:
    async def broken(accept: str) -> Page:
        raise ValueError("a bug")

    async def run() -> None:
        server = MetricsServer({"/broken": broken})
        await server.start("127.0.0.1", 0)
        assert (await ask(server, get("/broken")))[0] == HTTPStatus.INTERNAL_SERVER_ERROR
        await server.close()

    asyncio.run(run())


def test_closing_ends_what_is_open() -> None:
    async def run() -> None:
        async with serving() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"GET /metr")
            await ask(server, get("/healthz"))
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_ipv6() -> None:
    async def run() -> None:
        async with serving(host="[::1]") as server:
            assert (await ask(server, get("/healthz"), "::1"))[0] == 200

    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    asyncio.run(run())


def test_a_taken_port_is_told() -> None:
    async def run(port: int) -> None:
        server = MetricsServer({})
        with pytest.raises(
            InvalidArgument,
            match=rf"metrics_port={port}: cannot listen on 127.0.0.1: Address already in use$",
        ):
            await server.start("127.0.0.1", port)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))
