"""Follows requests from start to end, for metrics, the log and limits; and an OpenTelemetry span for each, as
a child of its client's span, with the times of its stages. Names follow vLLM.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import grpc

from jengine import InvalidArgument, RequestOutput
from jengine.serving.calls.call import Call, interruption
from jengine.serving.calls.errors import Refusal, refusal
from jengine.serving.calls.named_model import NamedModel
from jengine.serving.guards.admission import Place
from jengine.serving.guards.security import current_key
from jengine.serving.logs import RequestLog
from jengine.serving.metrics.model_metrics import RequestWatch
from jengine.serving.metrics.server_metrics import Metrics

CLOSE_SECONDS = 2  # time to send the last spans
NAME = "llm_request"
MAX_REQUEST_ID = 256  # characters


class Spans:
    """Sends a span for each finished request to a collector, in the background.

    Args:
        model: the model's name.
        exporter: a SpanExporter of OpenTelemetry's SDK.
        at_once: whether to send each span as soon as it ends.
    """

    def __init__(self, model: str, exporter: Any, *, at_once: bool = False) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "jengine"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        )
        self._tracer = self._provider.get_tracer("jengine")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, endpoint: str, model: str) -> Spans:
        """Sends spans to a collector with OTLP over HTTP.

        Args:
            endpoint: its URL, such as http://127.0.0.1:4318/v1/traces.

        Raises:
            InvalidArgument: it is not a URL, or OpenTelemetry is not installed.
        """
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise InvalidArgument(
                "otlp_traces_endpoint", endpoint, "must be a URL such as http://127.0.0.1:4318/v1/traces"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return cls(model, OTLPSpanExporter(endpoint=endpoint))
        except ModuleNotFoundError as missing:
            raise InvalidArgument.needs_extra("otlp_traces_endpoint", endpoint, "otel", missing) from None

    def over(self, request: TrackedRequest, status: str, call: Call) -> None:
        """A request has ended with this gRPC status. The parent is its client's span (`traceparent`), if
        given.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        carrier = {
            str(name): str(value)
            for name, value in call.invocation_metadata() or ()
            if name in ("traceparent", "tracestate")
        }
        offset, end = time.time_ns() - time.monotonic_ns(), time.monotonic()

        def at(seconds: float) -> int:
            return offset + int(1e9 * seconds)

        output = request.output
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": request.adapter or request.model or self._model,
            "gen_ai.usage.prompt_tokens": request.prompt_tokens,
            "gen_ai.usage.completion_tokens": request.output_tokens,
            "gen_ai.usage.cached_prompt_tokens": 0 if output is None else output.num_cached_tokens or 0,
            "gen_ai.latency.e2e": end - request.began,
            "rpc.method": request.method,
            "rpc.grpc.status": status,
        }
        marks: list[float | None] = []
        if output is not None:
            times = output.metrics
            marks = [times.arrival, times.scheduled, times.first_token, times.finished or end]
            for name, mark in (
                ("time_in_queue", times.scheduled),
                ("time_to_first_token", times.first_token),
            ):
                if mark is not None:
                    attributes[f"gen_ai.latency.{name}"] = mark - times.arrival
        span = self._tracer.start_span(
            NAME,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=at(request.began),
        )
        if status != "OK":
            span.set_status(Status(StatusCode.ERROR, status))
        inside = set_span_in_context(span)
        for name, begun, ended in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            if begun is not None and ended is not None:
                self._tracer.start_span(name, context=inside, start_time=at(begun)).end(at(ended))
        span.end(at(end))

    def close(self) -> None:
        """Sends the remaining spans and stops."""
        self._provider.force_flush(CLOSE_SECONDS * 1000)
        self._provider.shutdown()


class TrackedRequest:
    """One request.

    Attributes:
        request_id: the client's id.
        model: the name of the model that it uses, once that is known.
        adapter: the same of its adapter.
        place: set once it has one.
        output: the live output, set once it is queued.
    """

    def __init__(self, method: str, request_id: str, metrics: Metrics) -> None:
        key = current_key.get()
        self.method, self.request_id, self.key = method, request_id, "" if key is None else key.name
        self.model: str | None = None
        self.adapter: str | None = None
        self.place: Place | None = None
        self.output: RequestOutput | None = None
        self.began, self.arrived = time.monotonic(), datetime.now(UTC)
        self._metrics = metrics
        self._watch: RequestWatch | None = None

    def uses(self, model: NamedModel) -> None:
        self.model, self.adapter = model.provider.info.name, model.lora

    def queued(self, output: RequestOutput | None) -> None:
        """Note that the request is valid, and waits or runs; without an output, that it has already ended."""
        self.output, self._watch = output, self._metrics.request_started(self.model)
        self._charge()

    def tokens(self, news: RequestOutput) -> None:
        """An output with new content only (output_kind delta or final)."""
        if self._watch is not None:
            self._watch.tokens(news)
        self._charge()

    def over(self) -> None:
        """Note that the request has ended or was aborted."""
        self._charge()
        if self._watch is not None:
            self._watch.ended(self.output)

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.output is None else len(self.output.prompt_token_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, in all completions."""
        return 0 if self.output is None else tokens_of(self.output)

    def _charge(self) -> None:
        if self.place is not None and self.place.limited:
            self.place.charge(self.prompt_tokens + self.output_tokens)

    def entry(self, refused: Refusal | None, status: str) -> dict[str, Any]:
        """The request's line in the request log. Times are seconds since its arrival."""
        output = self.output
        times = None if output is None else output.metrics

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(moment - self.began, 6)

        return {
            "time": self.arrived.isoformat(timespec="milliseconds"),
            "id": self.request_id,
            "key": self.key or None,
            "method": self.method,
            "model": self.model,
            "adapter": self.adapter,
            "status": status,
            "cause": None if refused is None else refused.cause,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": 0 if output is None else output.num_cached_tokens or 0,
            "output_tokens": self.output_tokens,
            "queue_seconds": since(None if times is None else times.scheduled),
            "first_token_seconds": since(None if times is None else times.first_token),
            "total_seconds": since(time.monotonic()),
            "finish_reasons": [part.finish_reason for part in (output.outputs if output else ())],
        }


class RequestTracker:
    """Receives reports on requests."""

    def __init__(self, metrics: Metrics, request_log: RequestLog | None, spans: Spans | None = None) -> None:
        self._metrics, self._request_log, self._spans = metrics, request_log, spans
        self._unfinished: set[TrackedRequest] = set()

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of all unfinished requests: prompts, and tokens generated so far."""
        return sum(request.prompt_tokens + request.output_tokens for request in self._unfinished)

    @contextmanager
    def track(self, method: str, request_id: str, call: Call, part: int = 0) -> Iterator[TrackedRequest]:
        """A context in which a request is answered. An exception that leaves it is the request's failure.

        Args:
            request_id: the client's; empty for a new one.
            part: index of a prompt in the request; each prompt after the first has its own id.

        Raises:
            Refusal: the id is too long.
        """
        shown = request_id[:MAX_REQUEST_ID] or new_id()
        request = TrackedRequest(method, f"{shown}-{part}" if part else shown, self._metrics)
        refused: Refusal | None = None
        status = "OK"
        self._unfinished.add(request)
        try:
            if len(request_id) > MAX_REQUEST_ID:  # it is repeated in answers, logs and spans
                message = f"request_id: {len(request_id)} characters; at most {MAX_REQUEST_ID}"
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, message, field="request_id")
            yield request
        except (asyncio.CancelledError, grpc.aio.BaseError):
            status = interruption(call).name
            raise
        except Exception as error:
            refused = refusal(error)
            status = refused.code.name
            raise
        finally:
            self._unfinished.discard(request)
            if refused is not None and request.output is None:
                self._metrics.rejected(refused.cause, request.key)
            self._metrics.request_over(request.key, status, request.prompt_tokens, request.output_tokens)
            if self._request_log is not None:
                self._request_log.write(request.entry(refused, status))
            if self._spans is not None:
                self._spans.over(request, status, call)


def tokens_of(output: RequestOutput) -> int:
    """Tokens of all completions."""
    return sum(len(completion.token_ids) for completion in output.outputs)


def new_id() -> str:
    """A random id, unlike AsyncLLM's own. Those can be guessed, so a client could take the next one and block
    another client."""
    return uuid.uuid4().hex
