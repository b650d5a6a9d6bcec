"""The protocol-independent interface of a call, with its images, and interceptors
of gRPC calls that run every handler in a context.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, NamedTuple, Protocol

import grpc

# A client's clock starts before the server's, so a call that times out may be cancelled with some time left.
DEADLINE_MARGIN = 0.1  # seconds


class Call(Protocol):
    """Implemented by gRPC's ServicerContext; for HTTP see http/calls.py."""

    def peer(self) -> str:
        """The client's address in gRPC's form: "ipv4:127.0.0.1:12345", "ipv6:%5B::1%5D:12345"."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Metadata of the request; for HTTP, the headers used for tracing."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Registers a function to call when the call's last message has been sent."""


def interruption(call: Call) -> grpc.StatusCode:
    """Why a call was cancelled: DEADLINE_EXCEEDED if its deadline has (nearly) passed, else CANCELLED."""
    left = call.time_remaining()
    if left is None or left > DEADLINE_MARGIN:
        return grpc.StatusCode.CANCELLED
    return grpc.StatusCode.DEADLINE_EXCEEDED


class NamedImage(NamedTuple):
    """An image with the name of its field, where that is not its place in `messages`.

    Attributes:
        source: a URL, or the bytes of a file.
    """

    source: str | bytes
    field: str


def rpc_kind(streams_requests: bool, streams_responses: bool) -> str:
    """The kind of a method in gRPC's names, such as unary_stream."""
    return "_".join("stream" if streams else "unary" for streams in (streams_requests, streams_responses))


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
        kind = rpc_kind(handler.request_streaming, handler.response_streaming)
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
