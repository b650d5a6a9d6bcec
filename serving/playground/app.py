"""The metrics port with the playground: metrics, probes, the page, live records, and OpenAI's API for the
chat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jengine.serving.calls.errors import Refusal
from jengine.serving.guards.bounds import sees_all_clients
from jengine.serving.http.app import Parts, application, endpoint
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import while_connected
from jengine.serving.http.hosts import OwnHosts
from jengine.serving.metrics.metrics_server import MakePage, Pages
from jengine.serving.playground.assets import HEADERS, assets
from jengine.serving.playground.live import LiveFeed

LIVE = "/page/live"


def playground(parts: Parts, pages: Pages) -> ASGIApp:
    """The port's ASGI application. The page itself needs no key; its data and requests do, if there are keys.

    Args:
        pages: pages for metrics and probes.
    """
    feed = LiveFeed(parts.shared.models, parts.shared.pace.readers, parts.why_not_ready)

    async def live(call: HttpCall) -> None:
        if not sees_all_clients():
            raise Refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                "the engine's records need an API key with admin=1",
                cause="admin",
            )
        await while_connected(call, _stream(call, feed))

    config = replace(parts.config, response_store_bytes=0)  # the page refers to no earlier responses
    app = application(
        parts._replace(config=config),
        [
            *[Route(path, _page(make), methods=["GET"]) for path, make in pages.items()],
            *[Route(path, _asset(*asset), methods=["GET"]) for path, asset in assets().items()],
            endpoint(parts, "GET", LIVE, live),
        ],
    )
    return app if parts.authenticator is not None else OwnHosts(app, frozenset(pages))


async def _stream(call: HttpCall, feed: LiveFeed) -> None:
    with feed.watch() as viewer:
        await call.start_events({})
        while True:
            await call.event(await viewer.next())


def _page(make: MakePage) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        page = await make(request.headers.get("accept", ""))
        return Response(page.body, page.status, page.headers, page.content_type)

    return handle


def _asset(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return Response(body, headers={**HEADERS, "content-type": kind})

    return handle
