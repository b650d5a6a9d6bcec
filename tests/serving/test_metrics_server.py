"""Metrics and probes over plain HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from jengine import EngineDead, InvalidArgument, Load
from jengine.serving.config import ServerConfig
from jengine.serving.http.front import HttpFront, page_routes
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics, Pages, pages_of


def no_engine() -> Load:
    raise EngineDead("starting")


@asynccontextmanager
async def serving(
    why: str | None = None, host: str = "127.0.0.1", pages: Pages | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the port."""
    pages = pages or pages_of(Metrics(ModelMetrics("tiny", no_engine, lambda: 0)), lambda: why)
    front = HttpFront(
        Starlette(routes=page_routes(pages)), ServerConfig(host=host, metrics_port=0), "metrics_port"
    )
    await front.start(None)
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{front.port}", timeout=60) as client:
            yield client
    finally:
        await front.close()


def test_paths() -> None:
    async def run() -> None:
        async with serving() as client:
            for path, status, text in (
                ("/metrics", 200, 'jengine:engine_up{model_name="tiny"} 0.0'),
                ("/metrics?name[]=x", 200, "jengine:engine_up"),
                ("/healthz", 200, "ok\n"),
                ("/readyz", 200, "ok\n"),
                ("/", 404, ""),
                ("/metrics/x", 404, ""),
            ):
                answer = await client.get(path)
                assert (answer.status_code, text in answer.text) == (status, True), (path, answer)
            head = await client.head("/healthz")
            assert (head.status_code, head.content) == (200, b"")
            assert (await client.post("/metrics")).status_code == 405
            accept = {"accept": "application/openmetrics-text;version=1.0.0"}
            answer = await client.get("/metrics", headers=accept)
            assert answer.status_code == 200 and answer.text.endswith("# EOF\n")

    asyncio.run(run())


def test_not_ready_says_why() -> None:
    async def run() -> None:
        async with serving("starting: the engine is not ready yet") as client:
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.text) == (503, "starting: the engine is not ready yet\n")
            assert int(answer.headers["retry-after"]) > 0
            assert (await client.get("/healthz")).text == "ok\n"

    asyncio.run(run())


def test_a_scrape_that_fails_is_an_answer() -> None:
    async def broken(accept: str) -> Response:
        raise ValueError("a bug")

    async def run() -> None:
        async with serving(pages={"/broken": broken}) as client:
            assert (await client.get("/broken")).status_code == 500

    asyncio.run(run())


def test_ipv6() -> None:
    async def run() -> None:
        async with serving(host="[::1]") as client:
            assert (await client.get("/healthz")).status_code == 200

    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    asyncio.run(run())


def test_a_taken_port_is_told() -> None:
    async def run(port: int) -> None:
        front = HttpFront(Starlette(), ServerConfig(host="127.0.0.1", metrics_port=port), "metrics_port")
        with pytest.raises(
            InvalidArgument,
            match=rf"metrics_port={port}: cannot listen on 127.0.0.1: Address already in use$",
        ):
            await front.start(None)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(taken.getsockname()[1]))
