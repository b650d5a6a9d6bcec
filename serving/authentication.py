"""Who may call: those who bring a known API key, over gRPC as over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import grpc

from jengine.serving.metrics import Metrics
from jengine.serving.security import ApiKeys, Key, current_key
from jengine.serving.sparse_log import SparseLog

OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # what an orchestrator asks before it knows any key

log = logging.getLogger("jengine.serving")


class Rejection(NamedTuple):
    """Why a call is not let in. `cause`: for metrics, one word."""

    cause: str
    message: str


MISSING = Rejection("missing_key", "an API key is needed, as metadata: authorization: Bearer KEY")
WRONG = Rejection("wrong_key", "the API key is not known")


class Authenticator:
    """Finds the keys that calls bring.

    Attributes:
        keys: may be replaced at any time; calls that have begun go on.
    """

    def __init__(self, keys: ApiKeys, metrics: Metrics | None = None) -> None:
        self.keys, self._metrics = keys, metrics or Metrics()
        self._rejections, self._raw = SparseLog(log.warning), SparseLog(log.error)

    def key_of(self, authorization: str | None) -> Key | Rejection:
        """Of a call with this header: `Bearer KEY`."""
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return MISSING
        presented = presented.strip()
        key = self.keys.find(presented)
        if key is not None:
            return key
        if (raw := self.keys.stored_raw(presented)) is not None:
            self._raw(
                "the line of %r in the keys file is the key itself, not its hash: replace both, since the file shows it "
                "(python -m jengine.serving.security NAME)",
                raw.name,
            )
        return WRONG

    def rejected(self, why: Rejection, peer: str) -> None:
        """Count and log a call that is not let in."""
        self._metrics.rejected(why.cause)
        self._rejections("rejected a call from %s: %s", peer, why.message)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Lets no gRPC call pass without a known key in its `authorization: Bearer KEY` metadata, but for health checks."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._rejecters = {why: self._rejecter(why) for why in (MISSING, WRONG)}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None or call.method.startswith(OPEN_SERVICES):
            return handler  # of methods that do not exist gRPC says so: which ones do is no secret
        key = self._authenticator.key_of(_authorization(call.invocation_metadata))
        if isinstance(key, Rejection):
            return self._rejecters[key]
        current_key.set(key)
        return handler

    def _rejecter(self, why: Rejection) -> grpc.RpcMethodHandler:
        async def reject(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            self._authenticator.rejected(why, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why.message)

        # As a streaming method, whatever was called: it answers before it has read, or parsed, any message.
        return grpc.stream_stream_rpc_method_handler(reject)


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    return next((value for name, value in metadata if name == "authorization" and isinstance(value, str)), None)
