"""An OpenTelemetry span for each request, as a child of its client's span, with the times of its stages.
Names follow vLLM.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jengine import InvalidArgument
from jengine.serving.calls.call import Call

if TYPE_CHECKING:
    from jengine.serving.requests.tracking import TrackedRequest

CLOSE_SECONDS = 2  # time to send the last spans
NAME = "llm_request"


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
            "gen_ai.response.model": request.adapter or self._model,
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
