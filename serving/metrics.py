"""What Prometheus reads: counted in plain integers as requests pass, put into its form only when it asks.

Names after the prefix, and what they mean, are vLLM's where it has them; `grpc_server_handled_total` is named as by gRPC's own libraries.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jengine import EngineDead, Load, RequestOutput
from jengine.serving.call import interruption

PREFIX = "jengine:"
SECONDS = tuple(factor * 10.0**power for power in range(-3, 3) for factor in (1, 2.5, 5))  # a millisecond to eight minutes
TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))  # one to half a million
UNFINISHED = "abort"  # why a request ended that nobody waited for


class Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it), the last for all."""
        out, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], list(self.counts), strict=True):
            total += count
            out.append((bound, float(total)))
        return out


@dataclass(slots=True)
class KeyUse:
    """What one API key has used."""

    requests: Counter[str] = field(default_factory=Counter)  # by gRPC status
    prompt_tokens: int = 0
    generation_tokens: int = 0


class RequestWatch:
    """One request's way, as its service sees it. This one is blind: for servers without metrics."""

    def tokens(self, output: RequestOutput) -> None:
        """An output in which only what is new is there (output_kind delta or final)."""

    def ended(self) -> None:
        """Exactly once, whatever happened."""


class Metrics:
    """What services tell, and nothing kept of it: for servers without metrics.

    Attributes:
        certificate_expiry: when the server's certificate expires, in seconds since 1970; None without TLS.
    """

    certificate_expiry: Callable[[], float | None] = staticmethod(lambda: None)

    def request_started(self) -> RequestWatch:
        return _BLIND

    def rpc_ended(self, method: str, code: grpc.StatusCode) -> None:
        """An RPC (`/package.Service/Method`) has ended; of those that no service has, only the number is kept, under `unknown`."""

    def http_ended(self, method: str, path: str, status: int) -> None:
        """An HTTP request for one of the server's paths has ended; 0 where the client went before it had an answer."""

    def rejected(self, cause: str, key: str = "") -> None:
        """A call was refused before it was queued. `cause` is one of a few words, `key` a known key's name."""

    def request_over(self, key: str, status: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended: with this status, having used these tokens."""


_BLIND = RequestWatch()


class PrometheusMetrics(Metrics, Collector):
    """Everything since the server started. Written by the event loop alone; read by Prometheus's threads, to whom a number may be new
    and another not yet.

    Args:
        model: its name, a label of every metric.
        load: the engine's; raises EngineDead where none is running.
        restarts: how often an engine was started again.
    """

    def __init__(self, model: str, load: Callable[[], Load], restarts: Callable[[], int]) -> None:
        self.model, self.load, self.restarts = model, load, restarts
        self.rpcs: Counter[tuple[str, str]] = Counter()  # by method and status
        self.http: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        self.finished: Counter[str] = Counter()  # completions by why they ended
        self.prompt_tokens = self.cached_prompt_tokens = self.generation_tokens = 0
        self.first_token, self.inter_token, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.queue_time, self.prompt_lengths = Histogram(), Histogram(TOKENS)
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
        if key:  # of the keys file: a bounded number
            use = self.by_key.setdefault(key, KeyUse())
            use.requests[status] += 1
            use.prompt_tokens += prompt_tokens
            use.generation_tokens += output_tokens

    def collect(self) -> Iterator[Metric]:
        """In Prometheus's form."""
        yield from self._engine()
        yield self._counter("engine_restarts", "Engines started again after one had died", self.restarts())
        if (expiry := self.certificate_expiry()) is not None:
            yield self._gauge("certificate_expiry_timestamp_seconds", "When the server's certificate expires", expiry)
        yield self._counter("prompt_tokens", "Prompt tokens of answered requests", self.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache", self.cached_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens", self.generation_tokens)
        ends = CounterMetricFamily(PREFIX + "request_success", "Completions by why they ended", labels=("model_name", "finished_reason"))
        for reason, count in list(self.finished.items()):
            ends.add_metric((self.model, reason), count)
        yield ends
        rpcs = CounterMetricFamily("grpc_server_handled", "RPCs by outcome", labels=("grpc_service", "grpc_method", "grpc_code"))
        for (method, code), count in list(self.rpcs.items()):
            service, _, name = method.strip("/").rpartition("/")
            rpcs.add_metric((service, name, code), count)
        yield rpcs
        http = CounterMetricFamily("http_requests", "HTTP requests by outcome", labels=("method", "handler", "status"))
        for (verb, path, answered), count in list(self.http.items()):
            http.add_metric((verb, path, str(answered or "")), count)
        yield http
        rejections = CounterMetricFamily(
            PREFIX + "request_rejections", "Calls refused before they were queued", labels=("model_name", "cause", "api_key")
        )
        for (cause, key), count in list(self.rejections.items()):
            rejections.add_metric((self.model, cause, key), count)
        yield rejections
        yield from self._keys()
        yield self._histogram("request_queue_time_seconds", "From a request's arrival to its first step", self.queue_time)
        yield self._histogram("request_prompt_tokens", "Prompt tokens of a request", self.prompt_lengths)
        yield self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token", self.first_token)
        yield self._histogram("inter_token_latency_seconds", "Between a completion's tokens", self.inter_token)
        yield self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end", self.end_to_end)

    def _engine(self) -> Iterator[Metric]:
        try:
            load = self.load()
        except EngineDead:
            yield self._gauge("engine_up", "Whether an engine is running", 0)
            return
        yield self._gauge("engine_up", "Whether an engine is running", 1)
        yield self._gauge("num_requests_running", "Requests that have a place in the batch", load.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one", load.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's pages in use; 1 is all", 1 - load.free_pages / max(load.pages, 1))
        yield self._gauge("kv_cache_pages", "Pages of the cache", load.pages)
        yield self._gauge("kv_cache_free_pages", "Pages of the cache that are free", load.free_pages)
        yield self._gauge("kv_cache_cached_pages", "Free pages of the cache that a prompt may still find", load.cached_pages)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", load.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", load.prefix_hits)
        hits = CounterMetricFamily(
            PREFIX + "prefix_cache_hit_pages", "Pages found in the prefix cache, by cache group", labels=("model_name", "group")
        )
        for group, count in zip(load.cache_groups, load.hit_pages, strict=True):
            hits.add_metric((self.model, group), count)
        yield hits
        yield self._counter("prefix_cache_evictions", "Cached pages that were given to other tokens", load.evictions)
        yield self._counter("num_preemptions", "Times that a running request lost its place", load.preemptions)
        outcomes = CounterMetricFamily(
            PREFIX + "request_targets", "Requests with ttft_ms or tpot_ms by how they ended", labels=("model_name", "outcome")
        )
        for outcome in ("met", "missed", "rejected"):
            outcomes.add_metric((self.model, outcome), getattr(load, f"targets_{outcome}"))
        yield outcomes
        decisions = CounterMetricFamily(
            PREFIX + "step_decisions", "Steps with prompts, by strategy and the reason for their size", labels=("model_name", "decision")
        )
        for decision, count in load.decisions:
            decisions.add_metric((self.model, decision), count)
        yield decisions
        yield self._gauge("programs_ready", "Compiled programs that steps can use", load.programs_ready)
        yield self._gauge("programs", "Programs of the engine's table", load.programs)
        yield self._counter("compiles_since_start", "Compilations since warm-up; each is a bug", load.compiles_since_start)

    def _keys(self) -> Iterator[Metric]:
        """By API key."""
        labels = ("model_name", "api_key")
        requests = CounterMetricFamily(PREFIX + "api_key_requests", "Requests by key and gRPC status", labels=(*labels, "grpc_code"))
        prompts = CounterMetricFamily(PREFIX + "api_key_prompt_tokens", "Prompt tokens by key", labels=labels)
        generated = CounterMetricFamily(PREFIX + "api_key_generation_tokens", "Generated tokens by key", labels=labels)
        for key, use in list(self.by_key.items()):
            for status, count in list(use.requests.items()):
                requests.add_metric((self.model, key, status), count)
            prompts.add_metric((self.model, key), use.prompt_tokens)
            generated.add_metric((self.model, key), use.generation_tokens)
        yield from (requests, prompts, generated)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, help, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, help, labels=("model_name",))
        family.add_metric((self.model,), value)
        return family

    def _histogram(self, name: str, help: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, help, labels=("model_name",))
        family.add_metric((self.model,), values.cumulative(), values.sum)
        return family


class _Watch(RequestWatch):
    def __init__(self, metrics: PrometheusMetrics) -> None:
        self.metrics, self.last = metrics, 0.0
        self.output: RequestOutput | None = None

    def tokens(self, output: RequestOutput) -> None:
        self.output = output
        outputs = output.outputs
        count = steps = len(outputs[0].token_ids)
        if len(outputs) > 1:
            news = [len(completion.token_ids) for completion in outputs]
            count, steps = sum(news), max(news)
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
        """The first tokens have come. Returns when they did."""
        times, metrics = output.metrics, self.metrics
        metrics.prompt_tokens += len(output.prompt_token_ids)
        metrics.cached_prompt_tokens += output.num_cached_tokens or 0
        first = times.first_token or now
        metrics.prompt_lengths.add(len(output.prompt_token_ids))
        if times.scheduled is not None:
            metrics.queue_time.add(times.scheduled - times.arrival)
        metrics.first_token.add(first - times.arrival)
        return first

    def ended(self) -> None:
        metrics, output = self.metrics, self.output
        if output is None:
            metrics.finished[UNFINISHED] += 1
            return
        for completion in output.outputs:
            metrics.finished[completion.finish_reason or UNFINISHED] += 1
        if output.metrics.finished is not None:
            metrics.end_to_end.add(output.metrics.finished - output.metrics.arrival)


# --- outcomes of RPCs -----------------------------------------------------------------------------


class OutcomeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Counts RPCs by how they ended. The first of a server's interceptors, so that it sees what others refuse."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], call: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(call)
        if handler is None:
            self.metrics.rpc_ended("unknown/unknown", grpc.StatusCode.UNIMPLEMENTED)
            return None
        asks, answers = (("stream" if streams else "unary") for streams in (handler.request_streaming, handler.response_streaming))
        return handler._replace(**{f"{asks}_{answers}": self._counted(call.method, getattr(handler, f"{asks}_{answers}"))})

    def _counted(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            with self._outcome(method, context):
                return await behavior(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with self._outcome(method, context):
                async with aclosing(behavior(request, context)) as messages:
                    async for message in messages:
                        yield message

        return stream if isasyncgenfunction(behavior) else answer if iscoroutinefunction(behavior) else behavior

    @contextmanager
    def _outcome(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[None]:
        code = grpc.StatusCode.UNKNOWN  # what gRPC makes of an exception
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
    return context.code() or None  # 0 where none was set
