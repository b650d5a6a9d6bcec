"""The steps of every HTTP request: key, limits, body, handler, errors, metrics."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from functools import partial

import grpc
from starlette.types import Receive, Scope, Send

from jengine.serving.calls.errors import Refusal
from jengine.serving.calls.model_provider import ModelProvider
from jengine.serving.guards.authentication import Authenticator, Rejection
from jengine.serving.guards.bounds import check_admin
from jengine.serving.guards.client_calls import ClientCalls
from jengine.serving.guards.security import current_key
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.errors import OPENAI, ErrorForm, HttpError, http_error
from jengine.serving.http.load_report import FORMAT, load_headers
from jengine.serving.metrics.server_metrics import Metrics

log = logging.getLogger("jengine.serving")

Handler = Callable[[HttpCall], Awaitable[None]]


class Gate:
    """Checks for every request before it is handled.

    Args:
        authenticator: None accepts all requests.
    """

    def __init__(
        self, models: ModelProvider, calls: ClientCalls, authenticator: Authenticator | None, metrics: Metrics
    ) -> None:
        self.models, self.calls, self.authenticator, self.metrics = models, calls, authenticator, metrics

    def check_key(self, call: HttpCall) -> None:
        """Raises Refusal without a known key."""
        current_key.set(None)  # a connection's next request may run in the same context
        if self.authenticator is None:
            return
        own = call.header(b"x-api-key")  # Anthropic's clients send it
        key = self.authenticator.key_of(call.header(b"authorization") or (own and f"Bearer {own}"))
        if isinstance(key, Rejection):
            self.authenticator.rejected(key, call.peer())
            raise Refusal(grpc.StatusCode.UNAUTHENTICATED, key.message, cause=key.cause)
        current_key.set(key)


class Endpoint:
    """An ASGI application for the requests of one path.

    Args:
        path: for metrics.
        open: whether no key is needed.
        errors: how the path's API shows errors.
    """

    def __init__(
        self, gate: Gate, path: str, handle: Handler, open: bool = False, errors: ErrorForm = OPENAI
    ) -> None:
        self._gate, self._path, self._handle, self._open, self._errors = gate, path, handle, open, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send)
        call.more_headers = partial(load_headers, call.header(FORMAT), self._gate.models)
        try:
            await self._answer(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.gone or task is None:
                raise
            task.uncancel()
        finally:
            call.done()
            self._gate.metrics.http_ended(scope["method"], self._path, call.status)

    async def _answer(self, call: HttpCall) -> None:
        try:
            if not self._open:
                self._gate.check_key(call)
            with self._gate.calls.one_more(call):
                await self._handle(call)
        except Exception as error:
            await report(call, self._shown(error, call.names), self._errors)

    def _shown(self, error: Exception, names: dict[str, str]) -> HttpError:
        shown = http_error(error, self._gate.models.retry_seconds, names)
        if shown.status == 500:  # without its message, which may quote a prompt
            log.error(
                "%s in %s:\n%s",
                type(error).__name__,
                self._path,
                "".join(traceback.format_tb(error.__traceback__)),
            )
        return shown


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


async def report(call: HttpCall, shown: HttpError, errors: ErrorForm) -> None:
    """Sends an error as the response, or as the last event of a response that has begun."""
    if not call.status:
        await call.discard()
        close = {"connection": "close"} if call.unread else {}
        await call.answer(
            shown.status, errors.body(shown).encode("utf-8", "replace"), {**shown.headers, **close}
        )
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
