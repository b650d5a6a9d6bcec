"""The steps of every HTTP request: host name, key, limits, body, handler, errors, metrics."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import grpc
import msgspec
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jengine import EngineDead
from jengine.serving.calls.errors import Refusal, log_unexpected
from jengine.serving.calls.model_provider import ModelProvider
from jengine.serving.config import ServerConfig
from jengine.serving.guards.access import Authenticator, Rejection
from jengine.serving.guards.admission import check_admin
from jengine.serving.guards.security import current_key
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.errors import OPENAI, HttpError, OpenAIErrors, http_error
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.service import Shared

MESSAGE = (
    "use the server's address or a name without a dot: without API keys (--api-keys), web pages under domain"
    " names are rejected\n"
)


def is_own(host: str) -> bool:
    """Whether a Host header is an address, or a name without a dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and "." not in name.removesuffix(".localhost")
    return True


@dataclass(frozen=True, slots=True)
class OwnHosts:
    """An ASGI application that forwards only these requests, and requests for open paths.

    Attributes:
        open_paths: paths that show and change nothing.
        pages_only: reject only requests that a browser sends for a web page (with `Origin`), so that other
            clients may use any name.
        origins: pages of these may use any name, too.
    """

    app: ASGIApp
    open_paths: frozenset[str] = frozenset()
    pages_only: bool = False
    origins: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"] not in self.open_paths
            and self._is_foreign(Headers(scope=scope))
        ):
            await PlainTextResponse(MESSAGE, 421)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if (self.pages_only and origin is None) or origin in self.origins:
            return False
        return not is_own(headers.get("host", ""))


Handler = Callable[[HttpCall], Awaitable[None]]
FORMAT, LOAD = b"endpoint-load-metrics-format", "endpoint-load-metrics"
METRICS_PREFIX = "named_metrics"


class Parts(NamedTuple):
    """Parts of a server that its HTTP endpoints share with the gRPC services.

    Attributes:
        authenticator: None accepts all requests.
        why_not_ready: returns None if the model answers.
    """

    config: ServerConfig
    shared: Shared
    authenticator: Authenticator | None
    metrics: Metrics
    why_not_ready: Callable[[], str | None]


class Endpoint:
    """An ASGI application for the requests of one path.

    Args:
        path: for metrics.
        open: whether no key is needed, and a client may have any number of calls.
        errors: how the path's API shows errors.
    """

    def __init__(
        self, parts: Parts, path: str, handle: Handler, open: bool = False, errors: OpenAIErrors = OPENAI
    ) -> None:
        self._parts, self._models = parts, parts.shared.models
        self._path, self._handle, self._open, self._errors = path, handle, open, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send)
        call.more_headers = partial(load_headers, call.header(FORMAT), self._models)
        try:
            await self._answer(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.gone or task is None:
                raise
            task.uncancel()
        finally:
            call.done()
            self._parts.metrics.http_ended(scope["method"], self._path, call.status)

    async def _answer(self, call: HttpCall) -> None:
        try:
            if self._open:
                await self._handle(call)
                return
            check_key(call, self._parts.authenticator)
            with self._parts.shared.admission.call(call):
                await self._handle(call)
        except Exception as error:
            await report(call, self._shown(error, call.names), self._errors)

    def _shown(self, error: Exception, names: dict[str, str]) -> HttpError:
        shown = http_error(error, self._models.retry_seconds, names)
        if shown.status == 500:
            log_unexpected(error, self._path)
        return shown


def endpoint(
    parts: Parts, method: str, path: str, handle: Handler, open: bool = False, errors: OpenAIErrors = OPENAI
) -> Route:
    """A route whose handler runs behind keys and limits, with errors in this form; see Endpoint."""
    return Route(path, Endpoint(parts, path, handle, open, errors), methods=[method])


def check_key(call: HttpCall, authenticator: Authenticator | None) -> None:
    """Raises Refusal without a known key."""
    current_key.set(None)  # a connection's next request may run in the same context
    if authenticator is None:
        return
    api_key = call.header(b"x-api-key")  # Anthropic's clients send it
    key = authenticator.key_of(call.header(b"authorization") or (api_key and f"Bearer {api_key}"))
    if isinstance(key, Rejection):
        authenticator.rejected(key, call.peer())
        raise Refusal(grpc.StatusCode.UNAUTHENTICATED, key.message, cause=key.cause)
    current_key.set(key)


def check_administrator(call: HttpCall) -> None:
    """Everything that administrators change over HTTP calls this.

    Raises:
        Refusal: the caller is no administrator or, without API keys, a web page on the administrator's
            machine.
    """
    check_admin(call.peer())
    if current_key.get() is None and call.header(b"origin") is not None:
        message = "without API keys, web pages may not do this"
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="admin")


async def report(call: HttpCall, shown: HttpError, errors: OpenAIErrors) -> None:
    """Sends an error as the response, or as the last event of a response that has begun."""
    if not call.status:
        await call.discard()
        close = {"connection": "close"} if call.unread else {}
        await call.answer(shown.status, errors.body(shown), {**shown.headers, **close})
    elif call.end_failed is not None:
        await call.end_failed(shown)
    else:
        await errors.end(call, shown)


async def while_connected(call: HttpCall, work: Awaitable[None]) -> None:
    """Runs the work, but cancels it if the client disconnects. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    watcher = asyncio.get_running_loop().create_task(call.watch(task))
    try:
        await work
    finally:
        watcher.cancel()


def load_headers(form: str | None, models: ModelProvider) -> dict[str, str]:
    """The header with the load of the default model, as load balancers know it (ORCA). Empty for other
    formats, and without an engine.

    Args:
        form: text or json, in any case; None: the request does not ask.
    """
    if form is None or form.upper() not in ("TEXT", "JSON"):
        return {}
    try:
        load = models.llm.load
    except EngineDead:
        return {}
    metrics: dict[str, float] = {
        "kv_cache_usage_perc": 1 - load.free_pages / max(load.pages, 1),
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
    }
    if load.first_token_seconds is not None:
        metrics["predicted_ttft_ms"] = 1000 * load.first_token_seconds
    if form.upper() == "JSON":
        return {LOAD: f"JSON {msgspec.json.encode({METRICS_PREFIX: metrics}).decode()}"}
    return {
        LOAD: "TEXT " + ", ".join(f"{METRICS_PREFIX}.{name}={value:.6g}" for name, value in metrics.items())
    }
