"""Interceptors of gRPC calls that run every handler in a context."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc


class ContextInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Base class: runs the handler of each call within `around`."""

    def around(self, method: str, context: grpc.aio.ServicerContext) -> AbstractAsyncContextManager[None]:
        """A context for a call of this method (`/package.Service/Method`)."""
        raise NotImplementedError

    def unknown(self) -> None:
        """A method that does not exist was called."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None:
            self.unknown()
            return None
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        return handler._replace(**{kind: self._wrapped(call.method, getattr(handler, kind))})

    def _wrapped(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self.around(method, context):
                return await behavior(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self.around(method, context), aclosing(behavior(request, context)) as messages:
                async for message in messages:
                    yield message

        return (
            stream if isasyncgenfunction(behavior) else answer if iscoroutinefunction(behavior) else behavior
        )
