"""The engine's load in a response's header, if the request asks for it, as load balancers know it (ORCA)."""

from __future__ import annotations

import msgspec

from jengine import EngineDead
from jengine.serving.calls.model_provider import ModelProvider

FORMAT, LOAD = b"endpoint-load-metrics-format", "endpoint-load-metrics"
PREFIX = "named_metrics"


def load_headers(form: str | None, models: ModelProvider) -> dict[str, str]:
    """The header with the load of the default model. Without one for other formats, and without an engine.

    Args:
        form: text or json, in any case; None: the request does not ask.
    """
    if form is None or form.upper() not in ("TEXT", "JSON"):
        return {}
    try:
        load = models.llm.load
    except EngineDead:
        return {}
    metrics: dict[str, float] = {
        "kv_cache_usage_perc": 1 - load.free_pages / max(load.pages, 1),
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
    }
    if load.first_token_seconds is not None:
        metrics["predicted_ttft_ms"] = 1000 * load.first_token_seconds
    if form.upper() == "JSON":
        return {LOAD: f"JSON {msgspec.json.encode({PREFIX: metrics}).decode()}"}
    return {LOAD: "TEXT " + ", ".join(f"{PREFIX}.{name}={value:.6g}" for name, value in metrics.items())}
