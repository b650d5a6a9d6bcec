"""Pages of the API's port beside OpenAI's API: links, the version, metrics."""

from __future__ import annotations

from html import escape

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from jengine import __version__
from jengine.serving.http.app import Parts, application, endpoint
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.endpoint import check_administrator
from jengine.serving.http.hosts import OwnHosts
from jengine.serving.http.rollout_routes import rollout_routes
from jengine.serving.metrics.metrics_server import pages_of
from jengine.serving.metrics.server_metrics import PrometheusMetrics

HTML = b"text/html; charset=utf-8"
LINKS = {
    "/v1/models": "the model",
    "/health": "200 if the model answers",
    "/version": "jengine's version",
    "/info": "number formats, devices and kernels",
    "/metrics": "metrics for Prometheus, if --metrics-port is given",
}
SHOWN = "name", "dtype", "quantization", "devices", "mesh", "kernels"  # of ModelInfo, in /info
POSTS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/tokenize",
    "/detokenize",
)


def api(parts: Parts) -> ASGIApp:
    """The application of the API's port. Pages of other origins may use it if config.allowed_origins has
    them.
    """
    app: ASGIApp = application(parts, [*small_pages(parts), *rollout_routes(parts)])
    origins = parts.config.origins
    if parts.authenticator is None and "*" not in origins:
        app = OwnHosts(app, pages_only=True, origins=frozenset(origins))
    return (
        CORSMiddleware(app, origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",))
        if origins
        else app
    )


def small_pages(parts: Parts) -> list[Route]:
    """The routes. `/` needs no key; `/metrics` needs one with admin=1, or a client on this machine if there
    are no keys, unless this is the metrics' port, too.
    """

    async def root(call: HttpCall) -> None:
        await call.answer(200, _root(parts.shared.models.info.name).encode(), kind=HTML)

    async def version(call: HttpCall) -> None:
        await call.answer(200, msgspec.json.encode({"version": __version__}))

    async def info(call: HttpCall) -> None:
        facts = parts.shared.models.info
        shown = {name: getattr(facts, name) for name in SHOWN}
        await call.answer(200, msgspec.json.encode(shown))

    routes = [
        endpoint(parts, "GET", "/", root, open=True),
        endpoint(parts, "GET", "/version", version),
        endpoint(parts, "GET", "/info", info),
    ]
    if isinstance(parts.metrics, PrometheusMetrics):
        make = pages_of(parts.metrics, parts.why_not_ready)["/metrics"]

        async def metrics(call: HttpCall) -> None:
            if not parts.config.metrics_on_api:
                check_administrator(call)
            page = await make(call.header(b"accept") or "")
            await call.answer(page.status, page.body, kind=page.content_type.encode())

        routes.append(endpoint(parts, "GET", "/metrics", metrics, open=parts.config.metrics_on_api))
    return routes


def _root(model: str) -> str:
    links = "".join(f'<li><a href="{path}">{path}</a>: {escape(text)}</li>' for path, text in LINKS.items())
    return (
        "<!doctype html><meta charset=utf-8><title>jengine</title><h1>jengine</h1><p>OpenAI's and"
        " Anthropic's APIs for"
        f" <b>{escape(model)}</b>. POST to {', '.join(POSTS)}.</p><ul>{links}</ul>"
    )
