"""Prometheus metrics of requests: counted in plain integers, and converted only when scraped.

Names (after the prefix) and meanings follow vLLM where it has the same metric; `grpc_server_handled_total`
follows gRPC's libraries.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from jengine import EngineDead, Load, RequestOutput, StepTotals
from jengine.serving.calls.call import interruption
from jengine.serving.metrics.engine_metrics import load_families, step_families
from jengine.serving.metrics.metric_families import TOKENS, Families, Histogram

UNFINISHED = "abort"  # finish reason of a request whose client has gone


@dataclass(slots=True)
class KeyUse:
    """Usage by one API key."""

    requests: Counter[str] = field(default_factory=Counter)  # by gRPC status
    prompt_tokens: int = 0
    generation_tokens: int = 0


class RequestWatch:
    """Receives the progress of one request. This base class ignores it, for servers without metrics."""

    def tokens(self, output: RequestOutput) -> None:
        """An output with new content only (output_kind delta or final)."""

    def ended(self) -> None:
        """Called exactly once."""


class Metrics:
    """Receives the events of services. This base class ignores them, for servers without metrics.

    Attributes:
        certificate_expiry: expiry of the server's certificate in seconds since 1970; None without TLS.
    """

    certificate_expiry: Callable[[], float | None] = staticmethod(lambda: None)

    def request_started(self) -> RequestWatch:
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


_BLIND = RequestWatch()


class PrometheusMetrics(Metrics, Collector):
    """All metrics since the server started.

    Only the event loop writes. Prometheus's threads read, and may see some numbers before others are updated.

    Args:
        model: the model's name, a label of every metric.
        load: returns the engine's load; raises EngineDead if none is running.
        restarts: returns the number of engine restarts.
        totals: returns totals of the engine's steps; raises as `load`.
        prefix: of the metrics' names, before a colon.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[], Load],
        restarts: Callable[[], int],
        totals: Callable[[], StepTotals] = StepTotals,
        prefix: str = "jengine",
    ) -> None:
        self.prefix = f"{prefix}:"
        self.model, self.load, self.restarts, self.totals = model, load, restarts, totals
        self.rpcs: Counter[tuple[str, str]] = Counter()  # RPCs by method and status
        self.http: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        self.finished: Counter[str] = Counter()  # completions by finish reason
        self.prompt_tokens = self.cached_prompt_tokens = self.generation_tokens = 0
        self.first_token, self.inter_token, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.queue_time, self.prefill_time, self.decode_time, self.inference_time = (
            Histogram(),
            Histogram(),
            Histogram(),
            Histogram(),
        )
        self.time_per_token, self.prompt_lengths, self.computed_lengths = (
            Histogram(),
            Histogram(TOKENS),
            Histogram(TOKENS),
        )
        self.output_lengths, self.longest_outputs = Histogram(TOKENS), Histogram(TOKENS)
        self.rejections: Counter[tuple[str, str]] = Counter()  # by cause and key
        self.by_key: dict[str, KeyUse] = {}

    def request_started(self) -> RequestWatch:
        return _Watch(self)

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
        of = Families(self.model, self.prefix)
        try:
            load, totals = self.load(), self.totals()
        except EngineDead:
            yield of.gauge("engine_up", "Whether an engine is running", 0)
        else:
            yield from load_families(of, load)
            yield from step_families(of, totals)
        yield of.counter("engine_restarts", "Restarts of the engine after it died", self.restarts())
        if (expiry := self.certificate_expiry()) is not None:
            yield of.gauge(
                "certificate_expiry_timestamp_seconds", "When the server's certificate expires", expiry
            )
        yield of.counter("prompt_tokens", "Prompt tokens of answered requests", self.prompt_tokens)
        yield of.counter(
            "prompt_tokens_cached", "Prompt tokens taken from the prefix cache", self.cached_prompt_tokens
        )
        yield of.counter("generation_tokens", "Generated tokens", self.generation_tokens)
        ends = [((reason,), count) for reason, count in list(self.finished.items())]
        yield of.counters("request_success", "Completions by finish reason", ("finished_reason",), ends)
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
        yield of.histogram(
            "request_queue_time_seconds", "From a request's arrival to its first step", self.queue_time
        )
        yield of.histogram(
            "request_prefill_time_seconds",
            "From a request's first step to its first token",
            self.prefill_time,
        )
        yield of.histogram(
            "request_decode_time_seconds", "From a request's first token to its last", self.decode_time
        )
        yield of.histogram(
            "request_inference_time_seconds",
            "From a request's first step to its last token",
            self.inference_time,
        )
        yield of.histogram("request_prompt_tokens", "Prompt tokens of a request", self.prompt_lengths)
        yield of.histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not cached",
            self.computed_lengths,
        )
        yield of.histogram(
            "request_generation_tokens", "Generated tokens of a completion", self.output_lengths
        )
        yield of.histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest completion",
            self.longest_outputs,
        )
        yield of.histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", self.first_token
        )
        yield of.histogram("inter_token_latency_seconds", "Between a completion's tokens", self.inter_token)
        yield of.histogram(
            "request_time_per_output_token_seconds", "The same, a request's mean", self.time_per_token
        )
        yield of.histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end", self.end_to_end
        )

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


class _Watch(RequestWatch):
    def __init__(self, metrics: PrometheusMetrics) -> None:
        self.metrics, self.last, self.lengths = metrics, 0.0, [0]
        self.output: RequestOutput | None = None

    def tokens(self, output: RequestOutput) -> None:
        self.output = output
        outputs = output.outputs
        count = steps = len(outputs[0].token_ids)
        if len(outputs) > 1:
            news = [len(completion.token_ids) for completion in outputs]
            count, steps = sum(news), max(news)
            self.lengths += [0] * (len(news) - len(self.lengths))
            for i, new in enumerate(news):
                self.lengths[i] += new
        else:
            self.lengths[0] += count
        if not steps:
            return
        now, metrics = time.monotonic(), self.metrics
        metrics.generation_tokens += count
        if not self.last:
            self.last = self._first(output, now)
            count, steps = count - sum(1 for completion in outputs if completion.token_ids), steps - 1
        if steps:
            metrics.inter_token.add((now - self.last) / steps, count)
            self.last = now

    def _first(self, output: RequestOutput, now: float) -> float:
        """The first tokens have arrived. Returns the time."""
        times, metrics = output.metrics, self.metrics
        metrics.prompt_tokens += len(output.prompt_token_ids)
        metrics.cached_prompt_tokens += output.num_cached_tokens or 0
        first = times.first_token or now
        metrics.prompt_lengths.add(len(output.prompt_token_ids))
        metrics.computed_lengths.add(len(output.prompt_token_ids) - (output.num_cached_tokens or 0))
        if times.scheduled is not None:
            metrics.queue_time.add(times.scheduled - times.arrival)
            metrics.prefill_time.add(first - times.scheduled)
        metrics.first_token.add(first - times.arrival)
        return first

    def ended(self) -> None:
        metrics, output = self.metrics, self.output
        if output is None:
            metrics.finished[UNFINISHED] += 1
            return
        for completion in output.outputs:
            metrics.finished[completion.finish_reason or UNFINISHED] += 1
        for length in self.lengths:
            metrics.output_lengths.add(length)
        metrics.longest_outputs.add(max(self.lengths))
        times = output.metrics
        if times.finished is None:
            return
        metrics.end_to_end.add(times.finished - times.arrival)
        if times.first_token is not None and times.scheduled is not None:
            decode = times.finished - times.first_token
            metrics.decode_time.add(decode)
            metrics.inference_time.add(times.finished - times.scheduled)
            if (most := max(self.lengths)) > 1:
                metrics.time_per_token.add(decode / (most - 1))


# --- outcomes of RPCs -----------------------------------------------------------------------------


class OutcomeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Counts RPCs by status. It is a server's first interceptor, so that it also counts rejections by
    others.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None:
            self.metrics.rpc_ended("unknown/unknown", grpc.StatusCode.UNIMPLEMENTED)
            return None
        asks, answers = (
            ("stream" if streams else "unary")
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        return handler._replace(
            **{f"{asks}_{answers}": self._counted(call.method, getattr(handler, f"{asks}_{answers}"))}
        )

    def _counted(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._outcome(method, context):
                return await behavior(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._outcome(method, context):
                async with aclosing(behavior(request, context)) as messages:
                    async for message in messages:
                        yield message

        return (
            stream if isasyncgenfunction(behavior) else answer if iscoroutinefunction(behavior) else behavior
        )

    @contextmanager
    def _outcome(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
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
