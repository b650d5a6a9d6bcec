"""The metrics port with the playground: metrics, probes, the page, live records, and OpenAI's API for the
chat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files

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
from jengine.serving.http.front import page_routes
from jengine.serving.http.hosts import OwnHosts
from jengine.serving.metrics.metrics_server import Pages
from jengine.serving.playground.live import LiveFeed

LIVE = "/page/live"
# Everything comes from this server; inline code is not executed, and text never becomes HTML.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


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
            *page_routes(pages),
            *[Route(path, _asset(*asset), methods=["GET"]) for path, asset in assets().items()],
            endpoint(parts, "GET", LIVE, live),
        ],
    )
    return app if parts.authenticator is not None else OwnHosts(app, frozenset(pages))


async def _stream(call: HttpCall, feed: LiveFeed) -> None:
    with feed.watch() as viewer:
        await call.start_events({})
        while True:
            await call.event([await viewer.next()])


def _asset(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return Response(body, headers={**HEADERS, "content-type": kind})

    return handle


@cache
def assets() -> dict[str, tuple[bytes, str]]:
    """(content, type) by path. The page itself is at /, its other files are under /page/."""
    files_by_path = {}
    for file in files("jengine.serving.playground").joinpath("static").iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        files_by_path[path] = file.read_bytes(), TYPES[file.name.rpartition(".")[2]]
    return files_by_path
