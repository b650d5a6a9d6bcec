"""Pages for operators: /metrics for Prometheus, /healthz and /readyz for probes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from jengine.serving.calls.model_provider import RESTART_SECONDS
from jengine.serving.metrics.server_metrics import PrometheusMetrics

KEEP_FACTOR = 4  # metrics are kept for this many times the processor time that making them took


class Page(NamedTuple):
    """A response. retry_after: seconds after which another request is worthwhile."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Beside the content's."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


MakePage = Callable[[str], Awaitable[Page]]  # maps a request's Accept header to a page
Pages = Mapping[str, MakePage]


class Recent:
    """A text that takes time to make. Concurrent requests share one, and it is kept for KEEP_FACTOR times the
    processor time that it took. So its cost is bounded, however often it is requested.
    """

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._until = 0.0  # monotonic seconds
        self._text: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        if self._text is None or (self._text.done() and time.monotonic() >= self._until):
            self._until = 0.0  # a failure is not kept
            self._text = asyncio.create_task(asyncio.to_thread(self._timed))
        return await asyncio.shield(self._text)

    def _timed(self) -> bytes:
        began = time.thread_time()
        text = self._make()
        self._until = time.monotonic() + KEEP_FACTOR * (time.thread_time() - began)
        return text


def pages_of(
    metrics: PrometheusMetrics,
    why_not_ready: Callable[[], str | None],
    retry_seconds: Callable[[], float] = lambda: RESTART_SECONDS,
) -> Pages:
    """The pages of a server.

    Args:
        why_not_ready: returns None if the model answers.
        retry_seconds: returns the seconds after which it should answer.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)

    async def healthz(accept: str) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")  # the event loop is running

    async def readyz(accept: str) -> Page:
        why = why_not_ready()
        if why is None:
            return Page(HTTPStatus.OK, b"ok\n")
        return Page(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n".encode(), retry_after=math.ceil(retry_seconds())
        )

    texts: dict[str, Recent] = {}  # by content type, of which there are a few

    async def prometheus(accept: str) -> Page:
        encode, content_type = choose_encoder(accept)
        recent = texts.setdefault(content_type, Recent(lambda: encode(registry)))
        return Page(HTTPStatus.OK, await recent.text(), content_type)

    return {"/metrics": prometheus, "/healthz": healthz, "/readyz": readyz}
