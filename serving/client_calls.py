"""Bounds the calls that one client may have at once, of whatever method: also of those that admission control does not see."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc

from jengine.serving.admission import client_of
from jengine.serving.errors import busy, status_metadata
from jengine.serving.metrics import Metrics
from jengine.serving.security import current_key

RETRY_SECONDS = 1.0


class ClientCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Rejects a client's calls with RESOURCE_EXHAUSTED while it has `limit` others: watched health, aborts, questions, requests.

    A key that may have more streams than that may have as many calls.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._calls: Counter[str] = Counter()  # by client

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None:
            return None
        asks, answers = (("stream" if streams else "unary") for streams in (handler.request_streaming, handler.response_streaming))
        return handler._replace(**{f"{asks}_{answers}": self._counted(getattr(handler, f"{asks}_{answers}"))})

    def _counted(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with await self._one_more(context):
                return await behavior(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with await self._one_more(context):
                async with aclosing(behavior(request, context)) as messages:
                    async for message in messages:
                        yield message

        return stream if isasyncgenfunction(behavior) else answer if iscoroutinefunction(behavior) else behavior

    async def _one_more(self, context: grpc.aio.ServicerContext) -> AbstractContextManager[None]:
        """Counts it within what is returned; aborts the call where there are too many."""
        client, key = client_of(context), current_key.get()
        limit = self._limit if key is None or key.max_streams is None else max(self._limit, key.max_streams)
        if self._calls.get(client, 0) >= limit:
            self._metrics.rejected("client_calls")
            refused = busy(f"this client has {limit} calls; it may have no more at once", RETRY_SECONDS)
            await context.abort(refused.code, refused.message, status_metadata(refused))
        return self._counting(client)

    @contextmanager
    def _counting(self, client: str) -> Iterator[None]:
        self._calls[client] += 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]
