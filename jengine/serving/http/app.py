"""The ASGI applications: paths of OpenAI's API, and vLLM's additional ones; on the API's port also links, the
version, metrics, and what trainers need.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import grpc
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jengine import AsyncLLM, InvalidArgument, __version__
from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import NotReady
from jengine.serving.guards.admission import client_of
from jengine.serving.http.calls import HttpCall, json_object
from jengine.serving.http.chat_completions import ChatCompletions
from jengine.serving.http.chat_service import ChatService
from jengine.serving.http.completion_service import CompletionService
from jengine.serving.http.endpoint import OwnHosts, Parts, check_administrator, endpoint
from jengine.serving.http.errors import ANTHROPIC, OPENAI, http_error
from jengine.serving.http.messages import body as messages_body
from jengine.serving.http.messages.reply import Messages
from jengine.serving.http.responses import body as responses_body
from jengine.serving.http.responses.earlier import (
    EarlierResponses,
    ResponseStore,
    no_compaction,
    no_websocket,
)
from jengine.serving.http.responses.reply import Responses
from jengine.serving.http.text_service import (
    RANKS,
    SCORES,
    EmbeddingService,
    LoraService,
    ScoringService,
    TextService,
)
from jengine.serving.metrics.server_metrics import pages_of
from jengine.serving.requests.lora_changes import folder_below

log = logging.getLogger("jengine.serving")
MOST_BYTES = 2**16  # of a body
Query = dict[str, list[str]]
Answer = Callable[[AsyncLLM, Query], Awaitable[Any]]
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


def application(parts: Parts, more: Sequence[Route] = ()) -> Starlette:
    """All endpoints, and further routes."""
    shared = parts.shared
    chat, messages = ChatService(shared, ChatCompletions()), ChatService(shared, Messages())
    count = messages.counter(messages_body.read_to_count, lambda tokens: {"input_tokens": tokens})
    store = ResponseStore(parts.config.response_store_bytes)
    earlier = EarlierResponses(store, shared.text_work, parts.config.max_message_bytes)
    responses = ChatService(shared, Responses(store), earlier.expand)
    count_input = responses.counter(
        responses_body.read_to_count,
        lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    )
    completions, texts, loras = CompletionService(shared), TextService(shared), LoraService(shared)
    scores, ranks = ScoringService(shared, SCORES), ScoringService(shared, RANKS)

    async def health(call: HttpCall) -> None:
        """How many programs of the default model are ready, as JSON; nothing while it is not loaded."""
        if (why := parts.why_not_ready()) is not None:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, why, retry_seconds=shared.models.retry_seconds)
        ready = b""
        with contextlib.suppress(NotReady):
            load = shared.models.llm.load
            ready = msgspec.json.encode({"programs_ready": load.programs_ready, "programs": load.programs})
        await call.answer(200, ready)

    route = partial(endpoint, parts)

    async def wrong(request: Request, error: Exception) -> Response:
        """The answer for an unknown path or method. The existing ones are no secret."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase}"
        parts.metrics.http_ended("unknown", "unknown", error.status_code)
        errors = ANTHROPIC if request.url.path.startswith("/v1/messages") else OPENAI
        body = b"".join(errors.body(http_error(Refusal(grpc.StatusCode.NOT_FOUND, message), 0.0)))
        return Response(body, error.status_code, error.headers, "application/json")

    app = Starlette(
        routes=[
            route("GET", "/health", health, open=True),
            route("GET", "/ping", health, open=True),
            route("GET", "/v1/models", texts.models),
            route("GET", "/v1/models/{model:path}", texts.model),
            route("POST", "/v1/chat/completions", chat.create),
            route("POST", "/v1/messages", messages.create, errors=ANTHROPIC),
            route("POST", "/v1/messages/count_tokens", count, errors=ANTHROPIC),
            route("POST", "/v1/responses", responses.create),
            route("POST", "/v1/responses/input_tokens", count_input),
            route("POST", "/v1/responses/compact", no_compaction),
            route("GET", "/v1/responses", no_websocket),
            route("GET", "/v1/responses/{id}", earlier.retrieve),
            route("DELETE", "/v1/responses/{id}", earlier.delete),
            route("POST", "/v1/completions", completions.create),
            route("POST", "/v1/embeddings", EmbeddingService(shared).create),
            *(route("POST", path, scores.create) for path in ("/v1/score", "/score")),
            *(route("POST", path, ranks.create) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            route("POST", "/v1/load_lora_adapter", loras.load),
            route("POST", "/v1/unload_lora_adapter", loras.unload),
            route("POST", "/tokenize", texts.handler(texts.tokenize)),
            route("POST", "/detokenize", texts.handler(texts.detokenize)),
            *more,
        ],
        exception_handlers={404: wrong, 405: wrong},
    )
    app.router.redirect_slashes = False
    return app


class NewWeights(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /update_weights. `path`: a folder in weights_folder."""

    path: str
    version: int | str | None = None
    check_finite: bool = False
    keep_cache: bool = False


def rollout_routes(parts: Parts) -> list[Route]:
    """The routes; none unless rollout_api is set."""
    if not parts.config.rollout_api:
        return []
    folder = parts.config.weights_folder

    def route(method: str, path: str, names: tuple[str, ...], answer: Answer) -> Route:
        async def handle(call: HttpCall) -> None:
            check_administrator(call)
            answered = await answer(parts.shared.models.llm, _query(call, names))
            if method == "POST":
                log.info("%s has called %s", client_of(call), path)
            await call.answer(200, msgspec.json.encode(answered))

        return endpoint(parts, method, path, handle)

    async def update_weights(call: HttpCall) -> None:
        check_administrator(call)
        _query(call, ())
        raw = await call.body(MOST_BYTES)
        json_object(raw)
        try:
            new = msgspec.json.decode(raw, type=NewWeights)
        except msgspec.ValidationError as wrong:
            raise InvalidArgument("body", raw.decode("utf-8", "replace"), str(wrong)) from None
        version = await parts.shared.models.llm.update_weights(
            str(_inside(folder, new.path)),
            new.version,
            check_finite=new.check_finite,
            keep_cache=new.keep_cache,
        )
        log.info("%s has updated the weights to version %s", client_of(call), version)
        await call.answer(200, msgspec.json.encode({"version": version}))

    return [
        route("POST", "/pause", ("mode",), _pause),
        route("POST", "/resume", (), _resume),
        route("GET", "/is_paused", (), _asking("is_paused", "is_paused")),
        route("POST", "/sleep", ("level", "mode", "tags"), _sleep),
        route("POST", "/wake_up", ("tags",), _wake_up),
        route("GET", "/is_sleeping", (), _asking("is_sleeping", "is_sleeping")),
        route("POST", "/reset_prefix_cache", (), _asking("done", "reset_prefix_cache")),
        endpoint(parts, "POST", "/update_weights", update_weights),
    ]


async def _pause(llm: AsyncLLM, query: Query) -> Any:
    await llm.pause(_one(query, "mode", "abort"))  # type: ignore[arg-type]
    return {"status": "paused"}


async def _resume(llm: AsyncLLM, query: Query) -> Any:
    await llm.resume()
    return {"status": "resumed"}


async def _sleep(llm: AsyncLLM, query: Query) -> Any:
    level = _one(query, "level", "1")
    if level not in ("1", "2"):
        raise InvalidArgument("level", level, "must be 1 or 2")
    mode: Any = _one(query, "mode", "abort")
    tags: Any = {"tags": query["tags"]} if "tags" in query else {}
    await llm.sleep(int(level), mode, **tags)
    return {"is_sleeping": True}


async def _wake_up(llm: AsyncLLM, query: Query) -> Any:
    tags: Any = query.get("tags")
    await llm.wake_up(tags)
    return {"is_sleeping": await llm.is_sleeping()}


def _asking(name: str, method: str) -> Answer:
    """Answers with what a method of AsyncLLM returns, as the member of this name."""

    async def answer(llm: AsyncLLM, query: Query) -> Any:
        return {name: await getattr(llm, method)()}

    return answer


def _query(call: HttpCall, names: tuple[str, ...]) -> Query:
    """The query's values by name.

    Raises:
        InvalidArgument: a name is unknown.
    """
    query = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, values in query.items():
        if name not in names:
            limit = f"is unknown here; {', '.join(names)} may be given" if names else "nothing may be given"
            raise InvalidArgument(name, values[0], limit)
    return query


def _one(query: Query, name: str, default: str) -> str:
    values = query.get(name, [default])
    if len(values) > 1:
        raise InvalidArgument(name, values, "must be given once")
    return values[0]


def _inside(folder: str | None, path: str) -> Path:
    """A folder in weights_folder.

    Raises:
        InvalidArgument: there is none, or the path leads out of it.
    """
    if folder is None:
        raise InvalidArgument("path", path, "the server has no weights_folder")
    weights = folder_below(Path(folder).resolve(), path, "path", "weights_folder")
    if weights is None:
        raise InvalidArgument("path", path, "must be a folder in the server's weights_folder")
    return weights


def api(parts: Parts) -> ASGIApp:
    """The application of the API's port. Pages of other origins may use it if config.allowed_origins has
    them.
    """
    app: ASGIApp = application(parts, [*small_pages(parts), *rollout_routes(parts)])
    origins = parts.config.origins
    if parts.authenticator is None and "*" not in origins:
        app = OwnHosts(app, pages_only=True, origins=frozenset(origins))
    if origins:
        return CORSMiddleware(app, origins, allow_methods=("GET", "POST", "DELETE"), allow_headers=("*",))
    return app


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
    if parts.metrics.models:
        make = pages_of(parts.metrics, parts.why_not_ready)["/metrics"]

        async def metrics(call: HttpCall) -> None:
            if not parts.config.metrics_on_api:
                check_administrator(call)
            page = await make(call.header(b"accept") or "")
            await call.answer(200, bytes(page.body), kind=page.headers["content-type"].encode())

        routes.append(endpoint(parts, "GET", "/metrics", metrics, open=parts.config.metrics_on_api))
    return routes


def _root(model: str) -> str:
    links = "".join(f'<li><a href="{path}">{path}</a>: {escape(text)}</li>' for path, text in LINKS.items())
    return (
        "<!doctype html><meta charset=utf-8><title>jengine</title><h1>jengine</h1><p>OpenAI's and"
        " Anthropic's APIs for"
        f" <b>{escape(model)}</b>. POST to {', '.join(POSTS)}.</p><ul>{links}</ul>"
    )
