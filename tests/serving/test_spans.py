"""Spans of OpenTelemetry: one for each request, below its client's, with its queue, prompt and tokens."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jengine import CompletionOutput, InvalidArgument, RequestOutput
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.tracking import RequestTracker, Spans
from tests.extras import of_extra

export = of_extra("dev", "opentelemetry.sdk.trace.export.in_memory_span_exporter")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(
    *metadata: tuple[str, str], fails: Exception | None = None, model: str | None = None
) -> list[Any]:
    """The spans of one request with this metadata."""
    exporter = export.InMemorySpanExporter()
    tracker = RequestTracker(Metrics(), None, spans := Spans("tiny", exporter, at_once=True))
    call: Any = SimpleNamespace(invocation_metadata=lambda: metadata, time_remaining=lambda: None)
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1] * 4, outputs=[CompletionOutput(token_ids=[5, 6])]
    )
    now = time.monotonic()
    output.num_cached_tokens = 2
    output.metrics.arrival, output.metrics.scheduled = now - 1.0, now - 0.75
    output.metrics.first_token, output.metrics.finished = now - 0.5, now
    try:
        with tracker.track("Generate", "mine", call) as request:
            request.began, request.model = now - 1.0, model
            if fails is not None:
                raise fails
            request.output = output
    except Exception as error:
        assert error is fails
    spans.close()
    return list(exporter.get_finished_spans())


def test_a_request_below_its_client() -> None:
    *parts, whole = spans_of(("user-agent", "x"), ("traceparent", PARENT))
    assert (
        whole.name == "llm_request"
        and f"{whole.parent.trace_id:032x}-{whole.parent.span_id:016x}" == PARENT[3:-3]
    )
    attributes = {name.removeprefix("gen_ai."): value for name, value in whole.attributes.items()}
    assert (
        attributes["usage.prompt_tokens"],
        attributes["usage.completion_tokens"],
        attributes["usage.cached_prompt_tokens"],
    ) == (4, 2, 2)
    assert (attributes["request.id"], attributes["response.model"]) == ("mine", "tiny")
    assert attributes["latency.time_in_queue"] == pytest.approx(0.25) and attributes[
        "latency.time_to_first_token"
    ] == pytest.approx(0.5)
    assert abs(whole.end_time - time.time_ns()) < 60e9 and whole.status.is_unset
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert {part.parent.span_id for part in parts} == {whole.context.span_id}
    assert [(part.end_time - part.start_time) / 1e9 for part in parts] == pytest.approx(
        [0.25, 0.25, 0.5], abs=1e-3
    )


def test_a_request_that_failed() -> None:
    [span] = spans_of(fails=InvalidArgument("n", 0, "at least 1"))
    assert (
        span.parent is None
        and not span.status.is_ok
        and span.attributes["rpc.grpc.status"] == "INVALID_ARGUMENT"
    )
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 0


def test_a_model_beside_the_default_one() -> None:
    assert spans_of(model="small")[-1].attributes["gen_ai.response.model"] == "small"


def test_over_http_too() -> None:
    from jengine.serving.http.calls import HttpCall

    async def main() -> HttpCall:
        scope: Any = {
            "headers": [(b"traceparent", PARENT.encode()), (b"cookie", b"secret")],
            "client": ("127.0.0.1", 5),
        }
        return HttpCall(scope, None, None)  # type: ignore[arg-type]

    assert asyncio.run(main()).invocation_metadata() == [("traceparent", PARENT)]


@pytest.mark.parametrize("endpoint", ["collector:4317", "", "grpc://collector"])
def test_what_is_no_collector(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="otlp_traces_endpoint"):
        Spans.of(endpoint, "tiny")
