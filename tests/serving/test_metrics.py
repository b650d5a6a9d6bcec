"""Prometheus metrics over HTTP, and their consistency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from jengine import CompletionOutput, EngineDead, Load, RequestOutput
from jengine.core.updates import StoreLoad
from jengine.serving.guards.access import Authenticator, KeyInterceptor
from jengine.serving.guards.security import ApiKeys, hash_line
from jengine.serving.metrics.model_metrics import Families, Histogram, ModelMetrics, RequestWatch
from jengine.serving.metrics.server_metrics import Metrics, OutcomeInterceptor, pages_of
from jengine.spi import StepTotals

LOAD = Load(
    running=3, waiting=2, free_pages=30, pages=40, preemptions=5, compiles_since_start=1, cached_pages=12,
    prefix_queries=900,
    prefix_hits=320, hit_pages=(20, 4), cache_groups=("full", "window[512]"), evictions=6,
    host_pages=50, host_used=20, host_queries=580, host_hits=160, host_declined=16, host_spilled=30,
    host_fetched=10, host_evictions=1, drafts=9, draft_tokens=30, accepted_tokens=(7, 5, 0),
    page_size=16, store=StoreLoad("disk", 9, 8, 1, 2, 4096, 0.5, 7, 3584, 3, 4),
)  # fmt: skip


def make(load: Load | None = LOAD, totals: StepTotals | None = None) -> Metrics:
    def known() -> Load:
        if load is None:
            raise EngineDead("gone")
        return load

    return Metrics(ModelMetrics("tiny", known, lambda: 7, lambda: totals or StepTotals()))


def scraped(metrics: Metrics) -> dict[tuple[Any, ...], float]:
    """Values by metric name and label values, without the model's label."""
    page = asyncio.run(pages_of(metrics, lambda: None)["/metrics"](""))  # type: ignore[arg-type]
    text = page.body.decode()
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert not sample.name.startswith("jengine:") or sample.labels.pop("model_name") == "tiny"
            out[
                (sample.name.removeprefix("jengine:"), *(value for _, value in sorted(sample.labels.items())))
            ] = sample.value
    return out


def output(
    arrival: float,
    first: float | None,
    end: float | None,
    *completions: tuple[int, str | None],
    prompt: int = 4,
) -> RequestOutput:
    """An update of a request: for each completion, its number of tokens and finish reason."""
    made = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=[1] * prompt,
        outputs=[
            CompletionOutput(index=i, token_ids=[1] * n, finish_reason=why)
            for i, (n, why) in enumerate(completions)
        ],  # type: ignore[arg-type]
    )
    made.num_cached_tokens = None if first is None else prompt // 2
    made.metrics.scheduled = None if first is None else arrival + 0.25
    made.metrics.arrival, made.metrics.first_token, made.metrics.finished = arrival, first, end
    return made


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(1, 5))))
def test_histogram(values: list[tuple[float, int]]) -> None:
    histogram = Histogram((0.1, 1.0, 100.0))
    for value, times in values:
        histogram.add(value, times)
    each = [value for value, times in values for _ in range(times)]
    expected = [("0.1", 0.1), ("1.0", 1.0), ("100.0", 100.0), ("+Inf", float("inf"))]
    family = Families("m", "").histogram("h", "", histogram.bounds, histogram.counts, histogram.sum)
    buckets = [(part.labels["le"], part.value) for part in family.samples if part.name == "h_bucket"]
    assert buckets == [(name, sum(value <= bound for value in each)) for name, bound in expected]
    assert histogram.sum == pytest.approx(sum(each))


def test_the_engine_as_last_heard() -> None:
    got = scraped(make())
    names = [
        key[0] for key in got if len(key) == 1 and any(word in key[0] for word in ("kv", "num", "engine"))
    ]
    assert {name: got[(name,)] for name in names} == {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25,
        "kv_cache_pages": 40, "kv_cache_free_pages": 30,
        "num_preemptions_total": 5, "engine_up": 1, "engine_restarts_total": 7, "kv_cache_cached_pages": 12,
        "engine_resident_memory_bytes": 0,
        "spec_decode_num_drafts_total": 9, "spec_decode_num_draft_tokens_total": 30,
        "spec_decode_num_accepted_tokens_total": 12,
        "request_max_num_generation_tokens_count": 0, "request_max_num_generation_tokens_sum": 0,
        "request_prefill_kv_computed_tokens_count": 0, "request_prefill_kv_computed_tokens_sum": 0,
    }  # fmt: skip
    assert {key[1:]: value for key, value in got.items() if key[0].endswith("per_pos_total")} == {
        ("0",): 7, ("1",): 5, ("2",): 0,
    }  # fmt: skip
    assert {key[0].removeprefix("prefix_cache_"): value for key,
        value in got.items() if key[0].startswith("prefix") and len(key) == 1} == {
        "queries_total": 900, "hits_total": 320, "evictions_total": 6,
    }  # fmt: skip
    assert {key[0]: value for key,
        value in got.items() if key[0].startswith(("external_", "swapped", "cpu_cache"))} == {
        "cpu_cache_usage_perc": 0.4, "external_prefix_cache_queries_total": 580,
        "external_prefix_cache_hits_total": 160,
        "external_prefix_cache_declined_total": 16, "external_prefix_cache_evictions_total": 1,
        "swapped_out_pages_total": 30,
        "swapped_in_pages_total": 10,
    }  # fmt: skip
    assert (
        got[("prefix_cache_hit_pages_total", "full")] == 20
        and got[("prefix_cache_hit_pages_total", "window[512]")] == 4
    )
    assert got[("compiles_since_start_total",)] == 1 and got[("process_open_fds",)] > 0
    down = scraped(make(load=None))
    assert (
        down[("engine_up",)] == 0
        and ("num_requests_running",) not in down
        and down[("engine_restarts_total",)] == 7
    )


def test_requests_by_their_tokens_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("jengine.serving.metrics.model_metrics.time.monotonic", lambda: now)
    metrics = make()

    one = metrics.request_started()  # a stream: a token, two together, the last
    for now, tokens, end in ((10.5, 1, None), (10.7, 2, None), (11.0, 1, 11.0)):  # noqa: B007 (the lambda reads it)
        one.tokens(output(10.0, 10.5, end, (tokens, None if end is None else "length")))
    one.ended()

    two, now = metrics.request_started(), 25.0  # unary: two completions at once, at the end
    two.tokens(output(20.0, 21.0, 25.0, (5, "stop"), (3, "length"), prompt=6))
    two.ended()

    left, now = metrics.request_started(), 31.0  # its client has left
    left.tokens(output(30.0, 31.0, None, (1, None)))
    left.ended()
    metrics.request_started().ended()  # nothing came
    gone = metrics.request_started()  # without a stream: its client has left before the answer
    gone.ended(output(30.0, 30.5, None, (2, "abort"), (1, "abort"), prompt=7))

    got = scraped(metrics)
    assert (got[("prompt_tokens_total",)], got[("generation_tokens_total",)]) == (21, 4 + 8 + 1 + 3)
    assert got[("prompt_tokens_cached_total",)] == 2 + 3 + 2 + 3
    assert {key[1]: value for key, value in got.items() if key[0] == "request_success_total"} == {
        "length": 2,
        "stop": 1,
        "abort": 4,
    }
    sums = {name: (got[(f"{name}_count",)], pytest.approx(got[(f"{name}_sum",)])) for name in LATENCIES}
    assert sums == {
        "time_to_first_token_seconds": (4, 0.5 + 1 + 1 + 0.5),
        "inter_token_latency_seconds": (3 + 6 + 1, 0.2 + 0.3 + 6 * 1.0 + 0.5),
        "e2e_request_latency_seconds": (2, 1 + 5),
        "request_queue_time_seconds": (4, 4 * 0.25),
        "request_prompt_tokens": (4, 21),
        "request_prefill_time_seconds": (4, 0.25 + 0.75 + 0.75 + 0.25),
        "request_decode_time_seconds": (2, 0.5 + 4.0),
        "request_inference_time_seconds": (2, 0.75 + 4.75),
        "request_generation_tokens": (6, 4 + 5 + 3 + 1 + 3),
        "request_time_per_output_token_seconds": (2, 0.5 / 3 + 4.0 / 4),
    }
    assert (
        got[("time_to_first_token_seconds_bucket", "0.25")] == 0
        and got[("time_to_first_token_seconds_bucket", "0.5")] == 2
    )


LATENCIES = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prompt_tokens", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_generation_tokens",
    "request_time_per_output_token_seconds",
)  # fmt: skip


def test_steps() -> None:
    totals = StepTotals(
        steps={"8+0": 3, "8+2": 1},
        seconds={"schedule": 0.25, "wait": 2.0},
        device_seconds=2.5,
        predicted_seconds=2.0,
        rows=20,
        padded_rows=12,
        prompt_tokens=100,
        padded_tokens=28,
        tokens=(0, 0, 0, 3, 0, 0, 0, 1, *[0] * 8),
        resident=1 << 30,
        pause_seconds=0.5,
        pauses=(7, 2, 1),
    )
    got = scraped(make(totals=totals))
    assert {key[1:]: value for key, value in got.items() if key[0] == "engine_steps_total"} == {
        ("8", "0"): 3,
        ("8", "2"): 1,
    }
    assert {key[1]: value for key, value in got.items() if key[0] == "step_rows_total"} == {
        "used": 20,
        "padding": 12,
    }
    assert {key[1]: value for key, value in got.items() if key[0] == "step_prompt_tokens_total"} == {
        "used": 100,
        "padding": 28,
    }
    assert {key[1]: value for key, value in got.items() if key[0] == "loop_seconds_total"} == {
        "schedule": 0.25,
        "wait": 2.0,
    }
    assert (got[("device_seconds_total",)], got[("predicted_device_seconds_total",)]) == (2.5, 2.0)
    assert (got[("iteration_tokens_total_bucket", "4")], got[("iteration_tokens_total_bucket", "8")]) == (
        0,
        3,
    )
    assert (got[("iteration_tokens_total_count",)], got[("iteration_tokens_total_sum",)]) == (4, 120)
    assert [got[("gc_collections_total", str(generation))] for generation in range(3)] == [7, 2, 1]
    assert (got[("gc_pause_seconds_total",)], got[("engine_resident_memory_bytes",)]) == (0.5, 1 << 30)
    states = {key[1]: value for key, value in got.items() if key[0] == "kv_cache_pages_by_state"}
    assert states == {"owned": 10, "cached": 12, "free": 18}


# metrics of vLLM 0.28 that have the same meaning here
VLLM = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits external_prefix_cache_queries"
    " external_prefix_cache_hits num_preemptions prompt_tokens generation_tokens request_success"
    " prompt_tokens_cached spec_decode_num_drafts spec_decode_num_draft_tokens"
    " spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos",
    "histogram": "iteration_tokens_total request_prompt_tokens request_generation_tokens"
    " request_max_num_generation_tokens request_prefill_kv_computed_tokens time_to_first_token_seconds"
    " inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds"
    " request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds"
    " request_decode_time_seconds",
}


def test_vllms_names() -> None:
    metrics = Metrics(ModelMetrics("tiny", lambda: LOAD, lambda: 0), prefix="vllm")
    kinds = {metric.name: metric.type for metric in metrics.collect()}
    expected = {f"vllm:{name}": kind for kind, names in VLLM.items() for name in names.split()}
    assert {name: kinds.get(name) for name in expected} == expected
    assert not any(name.startswith("jengine:") for name in kinds)
    [config] = [metric for metric in metrics.collect() if metric.name == "vllm:cache_config_info"]
    labels = {"model_name": "tiny", "block_size": "16", "num_gpu_blocks": "40"}
    assert [(sample.labels, sample.value) for sample in config.samples] == [(labels, 1)]


def test_by_key_and_cause() -> None:
    metrics = make()
    metrics.certificate_expiry = lambda: 1.5e9
    metrics.rejected("queue_full")
    metrics.rejected("priority", "anna")
    metrics.request_over("anna", "OK", 5, 7)
    metrics.request_over("anna", "CANCELLED", 1, 2)
    metrics.request_over("", "OK", 5, 7)
    got = scraped(metrics)
    assert {key[1:]: value for key, value in got.items() if key[0] == "request_rejections_total"} == {
        ("", "queue_full"): 1, ("anna", "priority"): 1,
    }  # fmt: skip
    assert (
        got[("api_key_requests_total", "anna", "OK")]
        == got[("api_key_requests_total", "anna", "CANCELLED")]
        == 1
    )
    assert (
        got[("api_key_prompt_tokens_total", "anna")],
        got[("api_key_generation_tokens_total", "anna")],
    ) == (6, 9)
    assert got[("certificate_expiry_timestamp_seconds",)] == 1.5e9 and (
        "certificate_expiry_timestamp_seconds",
    ) not in scraped(make())


async def _answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    if request == b"abort":
        await context.abort(grpc.StatusCode.NOT_FOUND, "none")
    if request == b"fail":
        raise ValueError("a bug")
    if request == b"wait":
        await asyncio.sleep(100)
    return request


async def _stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    for _ in range(3):
        yield await _answer(request, context)
    while request == b"endless":
        yield request
        await asyncio.sleep(0.01)


async def _written(request: bytes, context: grpc.aio.ServicerContext) -> None:
    await context.write(request)


def test_what_a_stranger_calls_is_no_label(tmp_path: Path) -> None:
    """Otherwise, anyone who can reach the port could exhaust the memory, with or without a key."""
    (tmp_path / "keys").write_text(hash_line("k" * 32))
    metrics = make()

    async def run() -> None:
        server = grpc.aio.server(
            interceptors=[
                OutcomeInterceptor(metrics),
                KeyInterceptor(Authenticator(ApiKeys.load(tmp_path / "keys"))),
            ]
        )
        server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "test.Service", {"Answer": grpc.unary_unary_rpc_method_handler(_answer)}
                )
            ]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in ("/test.Service/Answer", "/test.Service/A", "/a/b", "/a"):
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(method)(b"")
        await server.stop(None)

    asyncio.run(run())
    assert metrics.rpcs == {
        ("/test.Service/Answer", "UNAUTHENTICATED"): 1,
        ("unknown/unknown", "UNIMPLEMENTED"): 3,
    }


def test_rpcs_by_outcome(caplog: pytest.LogCaptureFixture) -> None:
    metrics = make()
    methods = {
        "Answer": grpc.unary_unary_rpc_method_handler(_answer),
        "Stream": grpc.unary_stream_rpc_method_handler(_stream),
        "Written": grpc.unary_stream_rpc_method_handler(_written),
    }

    async def ask(call: Any, messages: int | None = None) -> None:
        try:
            if not hasattr(call, "read"):
                await call
                return
            while messages != 0 and await call.read() is not grpc.aio.EOF:
                messages = None if messages is None else messages - 1
        except grpc.aio.AioRpcError:
            pass

    async def run() -> None:
        server = grpc.aio.server(interceptors=[OutcomeInterceptor(metrics)])
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Service", methods)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for request in (b"ok", b"ok", b"abort", b"fail"):
                await ask(channel.unary_unary("/test.Service/Answer")(request))
                await ask(channel.unary_stream("/test.Service/Stream")(request))
                await ask(channel.unary_stream("/test.Service/Written")(request))
            await ask(channel.unary_unary("/test.Service/Answer")(b"wait", timeout=0.1))
            await ask(channel.unary_stream("/test.Service/Stream")(b"wait", timeout=0.1))
            left = channel.unary_stream("/test.Service/Stream")(b"endless")
            await ask(left, messages=5)
            left.cancel()
            await ask(channel.unary_unary("/test.Service/Nothing")(b""))
            await ask(channel.unary_unary("/other.Service/Nothing")(b""))
        await server.stop(None)

    asyncio.run(run())
    got = {key[1:]: value for key, value in scraped(metrics).items() if key[0] == "grpc_server_handled_total"}
    assert got == {
        ("OK", "Answer", "test.Service"): 2,
        ("NOT_FOUND", "Answer", "test.Service"): 1,
        ("UNKNOWN", "Answer", "test.Service"): 1,
        ("DEADLINE_EXCEEDED", "Answer", "test.Service"): 1,
        ("OK", "Stream", "test.Service"): 2,
        ("NOT_FOUND", "Stream", "test.Service"): 1,
        ("UNKNOWN", "Stream", "test.Service"): 1,
        ("DEADLINE_EXCEEDED", "Stream", "test.Service"): 1,
        ("CANCELLED", "Stream", "test.Service"): 1,
        ("OK", "Written", "test.Service"): 4,
        ("UNIMPLEMENTED", "unknown", "unknown"): 2,
    }


def test_without_models_requests_are_not_watched() -> None:
    assert Metrics().request_started() is None
    assert Metrics(ModelMetrics("a", Load, lambda: 0)).request_started("b") is None


def test_prompts_of_embeddings_count() -> None:
    model = ModelMetrics("tiny", lambda: LOAD, lambda: 0, StepTotals)
    made = output(1.0, 2.0, 3.0, (0, "stop"), prompt=50)
    made.embedding = [0.5]
    watch = RequestWatch(model)
    watch.tokens(made)
    watch.ended(made)
    assert (model.prompt_tokens, model.generation_tokens) == (50, 0)
    got = scraped(Metrics(model))
    for name in "request_prompt_tokens", "request_queue_time_seconds", "time_to_first_token_seconds":
        assert got[(f"{name}_count",)] == 1
