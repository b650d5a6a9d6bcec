"""What Prometheus reads: counted in plain integers as requests pass, put into its form only when it asks.

Names after the prefix, and what they mean, are vLLM's where it has them; `grpc_server_handled_total` is named as by gRPC's own libraries.
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
from jengine.serving.call import interruption
from jengine.serving.engine_metrics import load_families, step_families
from jengine.serving.metric_families import TOKENS, Families, Histogram

UNFINISHED = "abort"  # why a request ended that nobody waited for


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
        totals: of the engine's steps; raises as `load`.
    """

    def __init__(
        self, model: str, load: Callable[[], Load], restarts: Callable[[], int], totals: Callable[[], StepTotals] = StepTotals
    ) -> None:
        self.model, self.load, self.restarts, self.totals = model, load, restarts, totals
        self.rpcs: Counter[tuple[str, str]] = Counter()  # by method and status
        self.http: Counter[tuple[str, str, int]] = Counter()  # HTTP requests by method, path and status
        self.finished: Counter[str] = Counter()  # completions by why they ended
        self.prompt_tokens = self.cached_prompt_tokens = self.generation_tokens = 0
        self.first_token, self.inter_token, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.queue_time, self.prefill_time, self.decode_time, self.inference_time = Histogram(), Histogram(), Histogram(), Histogram()
        self.time_per_token, self.prompt_lengths, self.output_lengths = Histogram(), Histogram(TOKENS), Histogram(TOKENS)
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
        of = Families(self.model)
        try:
            load, totals = self.load(), self.totals()
        except EngineDead:
            yield of.gauge("engine_up", "Whether an engine is running", 0)
        else:
            yield from load_families(of, load)
            yield from step_families(of, totals)
        yield of.counter("engine_restarts", "Engines started again after one had died", self.restarts())
        if (expiry := self.certificate_expiry()) is not None:
            yield of.gauge("certificate_expiry_timestamp_seconds", "When the server's certificate expires", expiry)
        yield of.counter("prompt_tokens", "Prompt tokens of answered requests", self.prompt_tokens)
        yield of.counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache", self.cached_prompt_tokens)
        yield of.counter("generation_tokens", "Generated tokens", self.generation_tokens)
        ends = [((reason,), count) for reason, count in list(self.finished.items())]
        yield of.counters("request_success", "Completions by why they ended", ("finished_reason",), ends)
        rpcs = CounterMetricFamily("grpc_server_handled", "RPCs by outcome", labels=("grpc_service", "grpc_method", "grpc_code"))
        for (method, code), count in list(self.rpcs.items()):
            service, _, name = method.strip("/").rpartition("/")
            rpcs.add_metric((service, name, code), count)
        yield rpcs
        http = CounterMetricFamily("http_requests", "HTTP requests by outcome", labels=("method", "handler", "status"))
        for (verb, path, answered), count in list(self.http.items()):
            http.add_metric((verb, path, str(answered or "")), count)
        yield http
        rejections = list(self.rejections.items())
        yield of.counters("request_rejections", "Calls refused before they were queued", ("cause", "api_key"), rejections)
        yield from self._keys(of)
        yield of.histogram("request_queue_time_seconds", "From a request's arrival to its first step", self.queue_time)
        yield of.histogram("request_prefill_time_seconds", "From a request's first step to its first token", self.prefill_time)
        yield of.histogram("request_decode_time_seconds", "From a request's first token to its last", self.decode_time)
        yield of.histogram("request_inference_time_seconds", "From a request's first step to its last token", self.inference_time)
        yield of.histogram("request_prompt_tokens", "Prompt tokens of a request", self.prompt_lengths)
        yield of.histogram("request_generation_tokens", "Generated tokens of a completion", self.output_lengths)
        yield of.histogram("time_to_first_token_seconds", "From a request's arrival to its first token", self.first_token)
        yield of.histogram("inter_token_latency_seconds", "Between a completion's tokens", self.inter_token)
        yield of.histogram("request_time_per_output_token_seconds", "The same, a request's mean", self.time_per_token)
        yield of.histogram("e2e_request_latency_seconds", "From a request's arrival to its end", self.end_to_end)

    def _keys(self, of: Families) -> Iterator[Metric]:
        """By API key."""
        used = list(self.by_key.items())
        requests = [((key, status), count) for key, use in used for status, count in list(use.requests.items())]
        yield of.counters("api_key_requests", "Requests by key and gRPC status", ("api_key", "grpc_code"), requests)
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
        """The first tokens have come. Returns when they did."""
        times, metrics = output.metrics, self.metrics
        metrics.prompt_tokens += len(output.prompt_token_ids)
        metrics.cached_prompt_tokens += output.num_cached_tokens or 0
        first = times.first_token or now
        metrics.prompt_lengths.add(len(output.prompt_token_ids))
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
