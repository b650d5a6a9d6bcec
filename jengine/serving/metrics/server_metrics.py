"""Prometheus metrics of requests: counted in plain integers, and converted only when scraped.

Names (after the prefix) and meanings follow vLLM where it has the same metric; `grpc_server_handled_total`
follows gRPC's libraries.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from jengine.serving.calls.call import ContextInterceptor, interruption
from jengine.serving.metrics.metric_families import Families
from jengine.serving.metrics.model_metrics import ModelMetrics, ModelWatch, RequestWatch, merged


@dataclass(slots=True)
class KeyUse:
    """Usage by one API key."""

    requests: Counter[str] = field(default_factory=Counter)  # by gRPC status
    prompt_tokens: int = 0
    generation_tokens: int = 0


_BLIND = RequestWatch()


class Metrics:
    """Receives the events of services. This base class ignores them, for servers without metrics.

    Attributes:
        certificate_expiry: expiry of the server's certificate in seconds since 1970; None without TLS.
    """

    certificate_expiry: Callable[[], float | None] = staticmethod(lambda: None)

    def request_started(self, model: str | None = None) -> RequestWatch:
        """A request waits or runs. `model`: the name of its model; None: the default model."""
        return _BLIND

    def rpc_ended(self, method: str, code: grpc.StatusCode) -> None:
        """An RPC (`/package.Service/Method`) has ended. Unknown methods are counted together under
        `unknown`.
        """

    def http_ended(self, method: str, path: str, status: int) -> None:
        """An HTTP request for one of the server's paths has ended; status 0 if the client disconnected before
        the answer."""

    def rejected(self, cause: str, key: str = "") -> None:
        """A call was rejected before it was queued. `cause` is one of a few words, `key` a known key's
        name.
        """

    def request_over(self, key: str, status: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended with this status, having used these tokens."""


class PrometheusMetrics(Metrics, Collector):
    """All metrics since the server started.

    Only the event loop writes. Prometheus's threads read, and may see some numbers before others are updated.

    Args:
        models: those that the server offers, the default one first.
        prefix: of the metrics' names, before a colon.
    """

    def __init__(self, *models: ModelMetrics, prefix: str = "jengine") -> None:
        self.prefix = f"{prefix}:"
        self.model, self.models = models[0].model, {metrics.model: metrics for metrics in models}
        self.rpcs: Counter[tuple[str, str]] = Counter()  # RPCs by method and status
        self.http: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        self.rejections: Counter[tuple[str, str]] = Counter()  # by cause and key
        self.by_key: dict[str, KeyUse] = {}

    def request_started(self, model: str | None = None) -> RequestWatch:
        return ModelWatch(self.models[self.model if model is None else model])

    def rpc_ended(self, method: str, code: grpc.StatusCode) -> None:
        self.rpcs[method, code.name] += 1

    def http_ended(self, method: str, path: str, status: int) -> None:
        self.http[method, path, status] += 1

    def rejected(self, cause: str, key: str = "") -> None:
        self.rejections[cause, key] += 1

    def request_over(self, key: str, status: str, prompt_tokens: int, output_tokens: int) -> None:
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
        rejections = list(self.rejections.items())
        yield of.counters(
            "request_rejections", "Calls rejected before they were queued", ("cause", "api_key"), rejections
        )
        yield from self._keys(of)

    def _keys(self, of: Families) -> Iterator[Metric]:
        """Metrics by API key."""
        used = list(self.by_key.items())
        requests = [
            ((key, status), count) for key, use in used for status, count in list(use.requests.items())
        ]
        yield of.counters(
            "api_key_requests", "Requests by key and gRPC status", ("api_key", "grpc_code"), requests
        )
        prompts = [((key,), use.prompt_tokens) for key, use in used]
        yield of.counters("api_key_prompt_tokens", "Prompt tokens by key", ("api_key",), prompts)
        generated = [((key,), use.generation_tokens) for key, use in used]
        yield of.counters("api_key_generation_tokens", "Generated tokens by key", ("api_key",), generated)


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
