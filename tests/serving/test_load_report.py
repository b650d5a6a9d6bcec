"""What the Gateway API's endpoint picker and other load balancers read."""

from __future__ import annotations

import json
import socket

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jengine import Load
from jengine.serving.metrics.model_metrics import ModelMetrics
from jengine.serving.metrics.server_metrics import Metrics
from jengine.spi import LoraLoad
from tests.serving.conftest import MakeServer

# of the model server protocol: name, labels beside the model's
PICKER = {
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_running": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}


def test_the_endpoint_pickers_metrics() -> None:
    """All are gauges; the value of the adapters' is a time, and their labels list names."""
    load = Load(
        running=3, waiting=2, free_pages=30, pages=40, preemptions=0, compiles_since_start=0, page_size=16,
        first_token_seconds=0.25, loras=LoraLoad(4, 2, ("a", "b"), ("c",)),
    )  # fmt: skip
    registry = CollectorRegistry()
    registry.register(Metrics(ModelMetrics("tiny", lambda: load, lambda: 0), prefix="vllm"))
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, labels in PICKER.items():
        assert families[name].type == "gauge"
        [sample] = families[name].samples
        assert {*sample.labels} == {"model_name", *labels}
    values = {name: families[name].samples[0].value for name in families if families[name].samples}
    assert [values[f"vllm:{name}"] for name in ("num_requests_waiting", "num_requests_running")] == [2, 3]
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:predicted_time_to_first_token_seconds"] == 0.25
    adapters = families["vllm:lora_requests_info"].samples[0]
    assert adapters.labels["running_lora_adapters"] == "a,b" and adapters.value > 1e9


def test_metrics_on_the_apis_port(make_server: MakeServer) -> None:
    """Without keys, though the API needs them: the picker has none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with make_server(server={"port": port, "metrics_port": port, "api_key": ("sk-1",)}) as server:
        base = server.http.removesuffix("/v1")
        assert httpx.get(f"{base}/v1/models").status_code == 401
        scraped = httpx.get(f"{base}/metrics", headers={"host": "10.0.0.7"})
        assert scraped.status_code == 200 and "jengine:num_requests_waiting{" in scraped.text
    with make_server(server={"port": 0, "metrics_port": 0, "api_key": ("sk-1",)}) as server:
        assert httpx.get(f"{server.http.removesuffix('/v1')}/metrics").status_code == 401


def test_load_in_a_header(make_server: MakeServer) -> None:
    body = {"model": "mock", "prompt": "hello", "max_tokens": 2}
    with make_server(server={"port": 0}) as server:

        def load(form: str | None, **more: object) -> str | None:
            headers = {} if form is None else {"endpoint-load-metrics-format": form}
            answer = httpx.post(f"{server.http}/completions", json={**body, **more}, headers=headers)
            return answer.headers.get("endpoint-load-metrics")

        assert load(None) is None and load("BIN") is None
        kind, _, rest = (load("json", stream=True) or "").partition(" ")
        named = json.loads(rest)["named_metrics"]
        assert kind == "JSON" and named["predicted_ttft_ms"] == 0.0
        assert {*named} == {
            "kv_cache_usage_perc",
            "num_requests_running",
            "num_requests_waiting",
            "predicted_ttft_ms",
        }
        text = load("TEXT", max_tokens=0)  # an error has it, too
        assert text is not None and text.startswith("TEXT named_metrics.kv_cache_usage_perc=")
        assert "named_metrics.predicted_ttft_ms=0" in text.split(", ")
