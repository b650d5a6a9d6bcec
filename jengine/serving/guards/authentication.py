"""Authentication with API keys, for gRPC and HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NamedTuple

import grpc

from jengine.serving.guards.security import ApiKeys, Key, current_key
from jengine.serving.logs.request_log import SparseLog
from jengine.serving.metrics.server_metrics import Metrics

OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # used by orchestrators, which have no key

log = logging.getLogger("jengine.serving")


class Rejection(NamedTuple):
    """The reason for rejecting a call. `cause`: one word, for metrics."""

    cause: str
    message: str


MISSING = Rejection("missing_key", "an API key is required: `authorization: Bearer KEY`")
WRONG = Rejection("wrong_key", "the API key is unknown")


class Authenticator:
    """Finds the keys of calls.

    Attributes:
        keys: may be replaced at any time; running calls continue.
    """

    def __init__(self, keys: ApiKeys, metrics: Metrics | None = None) -> None:
        self.keys, self._metrics = keys, metrics or Metrics()
        self._rejections, self._raw = SparseLog(log.warning), SparseLog(log.error)

    def key_of(self, authorization: str | None) -> Key | Rejection:
        """The key of a call with this `Bearer KEY` header."""
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return MISSING
        presented = presented.strip()
        key = self.keys.find(presented)
        if key is not None:
            return key
        if (raw := self.keys.stored_raw(presented)) is not None:
            self._raw(
                "the line of %r in the keys file is the key itself, not its hash: replace both, since the"
                " file shows it (python -m jengine.serving.guards.security NAME)",
                raw.name,
            )
        return WRONG

    def rejected(self, why: Rejection, peer: str) -> None:
        """Counts and logs a rejected call."""
        self._metrics.rejected(why.cause)
        self._rejections("rejected a call from %s: %s", peer, why.message)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Rejects gRPC calls without a known key in their `authorization: Bearer KEY` metadata, except health
    checks.
    """

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._rejecters = {why: self._rejecter(why) for why in (MISSING, WRONG)}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None or call.method.startswith(OPEN_SERVICES):
            return handler  # gRPC reports unknown methods; their names are no secret
        key = self._authenticator.key_of(_authorization(call.invocation_metadata))
        if isinstance(key, Rejection):
            return self._rejecters[key]
        current_key.set(key)
        return handler

    def _rejecter(self, why: Rejection) -> grpc.RpcMethodHandler:
        async def reject(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            self._authenticator.rejected(why, context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, why.message)

        # A streaming method, whatever was called, since it answers before any message is read or parsed.
        return grpc.stream_stream_rpc_method_handler(reject)


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    return next(
        (value for name, value in metadata if name == "authorization" and isinstance(value, str)), None
    )
