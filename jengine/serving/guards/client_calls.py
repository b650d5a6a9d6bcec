"""Bounds the concurrent calls of one client over all methods and protocols, including calls that admission
control does not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

import grpc

from jengine.serving.calls.call import Busy, Call
from jengine.serving.calls.errors import refusal, status_metadata
from jengine.serving.calls.interceptors import ContextInterceptor
from jengine.serving.config import ServerConfig
from jengine.serving.guards.admission import client_of
from jengine.serving.guards.security import current_key
from jengine.serving.metrics.server_metrics import Metrics

RETRY_SECONDS = 1.0


class ClientCalls:
    """Counts calls by client. A key that may have more than `limit` streams may have as many calls.

    Attributes:
        limit: maximum concurrent calls of a client.
    """

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.limit, self._metrics = max(config.max_calls_per_client, config.max_streams_per_client), metrics
        self._calls: Counter[str] = Counter()  # by client

    def one_more(self, call: Call) -> AbstractContextManager[None]:
        """Returns a context in which the call is counted.

        Raises:
            Busy: the client has too many calls.
        """
        client, key = client_of(call), current_key.get()
        limit = self.limit if key is None or key.max_streams is None else max(self.limit, key.max_streams)
        if self._calls.get(client, 0) >= limit:
            self._metrics.rejected("client_calls")
            raise Busy(f"this client has {limit} calls, the maximum", RETRY_SECONDS)
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


class CallInterceptor(ContextInterceptor):
    """Counts gRPC calls, and rejects those of clients with too many with RESOURCE_EXHAUSTED."""

    def __init__(self, calls: ClientCalls) -> None:
        self._calls = calls

    @asynccontextmanager
    async def around(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        try:
            counted = self._calls.one_more(context)
        except Busy as busy:
            refused = refusal(busy)
            await context.abort(refused.code, refused.message, status_metadata(refused))
            raise
        with counted:
            yield
