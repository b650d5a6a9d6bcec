"""Prometheus metrics of requests, counted in plain integers and converted only when scraped, and pages for
operators: /metrics for Prometheus, /healthz and /readyz for probes.

Names (after the prefix) and meanings follow vLLM where it has the same metric; `grpc_server_handled_total`
follows gRPC's libraries.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from jengine.serving.calls.call import ContextInterceptor, interruption
from jengine.serving.calls.model_provider import RESTART_SECONDS
from jengine.serving.metrics.model_metrics import Families, ModelMetrics, RequestWatch, merged


@dataclass(slots=True)
class KeyUse:
    """Usage by one API key."""

    requests: Counter[str] = field(default_factory=Counter)  # by gRPC status
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Metrics(Collector):
    """All metrics since the server started.

    Only the event loop writes. Prometheus's threads read, and may see some numbers before others are updated.

    Args:
        models: the server's models, the default first. Empty: requests are not observed.
        prefix: of the metrics' names, before a colon.

    Attributes:
        certificate_expiry: expiry of the server's certificate in seconds since 1970; None without TLS.
    """

    certificate_expiry: Callable[[], float | None] = staticmethod(lambda: None)

    def __init__(self, *models: ModelMetrics, prefix: str = "jengine") -> None:
        self.prefix = f"{prefix}:"
        self.model = models[0].model if models else ""
        self.models = {metrics.model: metrics for metrics in models}
        self.rpcs: Counter[tuple[str, str]] = Counter()  # RPCs by method and status
        self.http: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        self.rejections: Counter[tuple[str, str]] = Counter()  # by cause and key
        self.by_key: dict[str, KeyUse] = {}

    def request_started(self, model: str | None = None) -> RequestWatch | None:
        """A request waits or runs. `model`: the name of its model; None: the default model."""
        metrics = self.models.get(self.model if model is None else model)
        return None if metrics is None else RequestWatch(metrics)

    def rpc_ended(self, method: str, code: grpc.StatusCode) -> None:
        """An RPC (`/package.Service/Method`) has ended. Unknown methods are counted together under
        `unknown`.
        """
        self.rpcs[method, code.name] += 1

    def http_ended(self, method: str, path: str, status: int) -> None:
        """An HTTP request for one of the server's paths has ended; status 0 if the client disconnected before
        the answer."""
        self.http[method, path, status] += 1

    def rejected(self, cause: str, key: str = "") -> None:
        """A call was rejected before it was queued. `cause` is one of a few words, `key` a known key's
        name.
        """
        self.rejections[cause, key] += 1

    def request_over(self, key: str, status: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended with this status, having used these tokens."""
        if key:  # the number of keys in the keys file is bounded
            use = self.by_key.setdefault(key, KeyUse())
            use.requests[status] += 1
            use.prompt_tokens += prompt_tokens
            use.generation_tokens += output_tokens

    def collect(self) -> Iterator[Metric]:
        """Metrics in Prometheus's form."""
        yield from merged(
            family for model in list(self.models.values()) for family in model.families(self.prefix)
        )
        of = Families(self.model, self.prefix)
        if (expiry := self.certificate_expiry()) is not None:
            yield of.gauge(
                "certificate_expiry_timestamp_seconds", "When the server's certificate expires", expiry
            )
        rpcs = CounterMetricFamily(
            "grpc_server_handled", "RPCs by outcome", labels=("grpc_service", "grpc_method", "grpc_code")
        )
        for (method, code), count in list(self.rpcs.items()):
            service, _, name = method.strip("/").rpartition("/")
            rpcs.add_metric((service, name, code), count)
        yield rpcs
        http = CounterMetricFamily(
            "http_requests", "HTTP requests by outcome", labels=("method", "handler", "status")
        )
        for (verb, path, answered), count in list(self.http.items()):
            http.add_metric((verb, path, str(answered or "")), count)
        yield http
        text = "Calls rejected before they were queued"
        yield of.counter("request_rejections", text, dict(self.rejections), "cause", "api_key")
        used = dict(self.by_key)
        requests = {
            (key, status): count for key, use in used.items() for status, count in dict(use.requests).items()
        }
        text = "Requests by key and gRPC status"
        yield of.counter("api_key_requests", text, requests, "api_key", "grpc_code")
        prompts = {key: use.prompt_tokens for key, use in used.items()}
        yield of.counter("api_key_prompt_tokens", "Prompt tokens by key", prompts, "api_key")
        generated = {key: use.generation_tokens for key, use in used.items()}
        yield of.counter("api_key_generation_tokens", "Generated tokens by key", generated, "api_key")


# --- outcomes of RPCs -----------------------------------------------------------------------------


class OutcomeInterceptor(ContextInterceptor):
    """Counts RPCs by status. It is a server's first interceptor, so that it also counts rejections by
    others.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def unknown(self) -> None:
        self.metrics.rpc_ended("unknown/unknown", grpc.StatusCode.UNIMPLEMENTED)

    @asynccontextmanager
    async def around(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        code = grpc.StatusCode.UNKNOWN  # gRPC's status for an exception
        try:
            yield
            code = _code_of(context) or grpc.StatusCode.OK
        except (asyncio.CancelledError, GeneratorExit):
            code = interruption(context)
            raise
        except BaseException:
            code = _code_of(context) or code
            raise
        finally:
            self.metrics.rpc_ended(method, code)


def _code_of(context: grpc.aio.ServicerContext) -> grpc.StatusCode | None:
    return context.code() or None  # 0 if none was set


KEEP_FACTOR = 4  # metrics are kept for this many times the processor time that making them took


MakePage = Callable[[str], Awaitable[Response]]  # maps a request's Accept header to a page
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
    metrics: Metrics,
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

    async def healthz(accept: str) -> Response:
        return PlainTextResponse("ok\n")  # the event loop is running

    async def readyz(accept: str) -> Response:
        if (why := why_not_ready()) is None:
            return PlainTextResponse("ok\n")
        return PlainTextResponse(f"{why}\n", 503, {"Retry-After": str(math.ceil(retry_seconds()))})

    texts: dict[str, Recent] = {}  # by content type, of which there are a few

    async def prometheus(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        recent = texts.setdefault(content_type, Recent(lambda: encode(registry)))
        return Response(await recent.text(), media_type=content_type)

    return {"/metrics": prometheus, "/healthz": healthz, "/readyz": readyz}
