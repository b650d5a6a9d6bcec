"""Prometheus metrics of an engine: its load, and totals of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Metric

from jengine import Load
from jengine.serving.metrics.metric_families import Families
from jengine.spi import LOAD_COUNTERS, LOAD_GAUGES, StepTotals

STORE_COUNTERS = (  # names, fields of StoreLoad, and what they are
    ("queried_pages", "queries", "Pages of prompts that were looked up in a store"),
    ("loaded_pages", "hits", "Pages that were loaded from a store"),
    ("loaded_bytes", "loaded_bytes", "Bytes of these pages"),
    ("load_seconds", "loading_seconds", "Seconds that loading them took"),
    (
        "declined_pages",
        "declined",
        "Pages that a store had and that were computed, since that is predicted to be faster",
    ),
    ("kept_pages", "kept", "Pages that were given to a store"),
    ("kept_bytes", "kept_bytes", "Bytes of these pages"),
    ("dropped_pages", "dropped", "Pages that a store had no room or no time for"),
    ("late_prompts", "late", "Prompts that waited for a store in vain, and were computed"),
    ("failures", "failures", "Failures of a store"),
)


def load_families(families: Families, load: Load) -> Iterator[Metric]:
    yield families.gauge("engine_up", "Whether an engine is running", 1)
    for name, field, text in LOAD_GAUGES:
        yield families.gauge(name, text, getattr(load, field))
    for name, field, text in LOAD_COUNTERS:
        yield families.counter(name, text, getattr(load, field))
    used = load.pages - load.free_pages
    text = "Share of the cache's pages in use; 1 is all"
    yield families.gauge("kv_cache_usage_perc", text, used / max(load.pages, 1))
    used_on_host = load.host_used / max(load.host_pages, 1)
    text = "Share of the host tier's pages in use; 1 is all"
    yield families.gauge("cpu_cache_usage_perc", text, used_on_host)
    config = (("block_size", "num_gpu_blocks"), [((str(load.page_size), str(load.pages)), 1.0)])
    yield families.gauges("cache_config_info", "Tokens of a page, and pages of the cache; always 1", *config)
    free = load.free_pages - load.cached_pages
    states = [(("owned",), used), (("cached",), load.cached_pages), (("free",), free)]
    yield families.gauges("kv_cache_pages_by_state", "Pages of the cache by state", ("state",), states)
    groups = [((group,), count) for group, count in zip(load.cache_groups, load.hit_pages, strict=True)]
    text = "Pages found in the prefix cache, by cache group"
    yield families.counters("prefix_cache_hit_pages", text, ("group",), groups)
    accepted = load.accepted_tokens
    text = "Tokens of drafts that became output"
    yield families.counter("spec_decode_num_accepted_tokens", text, sum(accepted))
    positions = [((str(position),), count) for position, count in enumerate(accepted)]
    text = "Tokens of drafts that became output, by position in the draft"
    yield families.counters("spec_decode_num_accepted_tokens_per_pos", text, ("position",), positions)
    places = zip(("cached", "swap", "recompute"), load.resumptions, strict=True)
    text = (
        "Preempted requests that resumed, by the place of their pages: on the device, on the host, or to be"
        " recomputed"
    )
    kinds = [((place,), count) for place, count in places]
    yield families.counters("num_preemptions_by_kind", text, ("kind",), kinds)
    outcomes = [
        ((outcome,), getattr(load, f"targets_{outcome}")) for outcome in ("met", "missed", "rejected")
    ]
    text = "Requests with ttft_ms or tpot_ms by how they ended"
    yield families.counters("request_targets", text, ("outcome",), outcomes)
    decisions = [((decision,), count) for decision, count in load.decisions]
    text = "Steps with prompts, by strategy and the reason for their size"
    yield families.counters("step_decisions", text, ("decision",), decisions)
    if (first := load.first_token_seconds) is not None:
        text = "Predicted seconds to the first token of a typical request that would arrive now"
        yield families.gauge("predicted_time_to_first_token_seconds", text, first)
    if (use := load.loras) is not None:  # with enable_lora
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        now = str(use.max_loras), ",".join(use.running), ",".join(use.waiting)
        text = (
            "Adapters that running and waiting requests use, and the most that may run; the value is the time"
        )
        yield families.gauges("lora_requests_info", text, labels, [(now, time.time())])
        yield families.gauge("lora_adapters", "LoRA adapters in host memory", use.loaded)
    if (store := load.store) is not None:  # with kv_transfer_config
        for name, field, text in STORE_COUNTERS:
            values = [((store.connector,), getattr(store, field))]
            yield families.counters(f"kv_transfer_{name}", text, ("connector",), values)


def step_families(families: Families, totals: StepTotals) -> Iterator[Metric]:
    """Totals of steps since the start, at most a second old while the engine runs."""
    programs = [(name.split("+"), count) for name, count in sorted(totals.steps.items())]
    yield families.counters(
        "engine_steps", "Steps by the rows and prompt tiles of their program", ("rows", "tiles"), programs
    )
    bounds = [*map(str, totals.token_bounds), "+Inf"]
    counts = list(zip(bounds, map(float, accumulate(totals.tokens)), strict=True))
    computed = totals.rows + totals.prompt_tokens
    yield families.buckets(
        "iteration_tokens_total", "Tokens computed in a step, without padding", counts, computed
    )
    rows = [(("used",), totals.rows), (("padding",), totals.padded_rows)]
    yield families.counters(
        "step_rows", "Decode rows of steps, with and without a sequence", ("state",), rows
    )
    tokens = [(("used",), totals.prompt_tokens), (("padding",), totals.padded_tokens)]
    yield families.counters(
        "step_prompt_tokens", "Tokens of prompt tiles of steps, likewise", ("state",), tokens
    )
    stages = [((stage,), seconds) for stage, seconds in totals.seconds.items()]
    yield families.counters(
        "loop_seconds", "Seconds of the engine's loop, by stage; wait is for the device", ("stage",), stages
    )
    yield families.counter(
        "device_seconds", "Seconds of the device, for steps with a known duration", totals.device_seconds
    )
    yield families.counter(
        "predicted_device_seconds",
        "Predicted seconds of the device for the same steps",
        totals.predicted_seconds,
    )
    pauses = [((str(generation),), count) for generation, count in enumerate(totals.pauses)]
    yield families.counters(
        "gc_collections",
        "Collections of Python's garbage collector in the engine's process",
        ("generation",),
        pauses,
    )
    yield families.counter("gc_pause_seconds", "Seconds of garbage collections", totals.pause_seconds)
    yield families.gauge("engine_resident_memory_bytes", "Memory of the engine's process", totals.resident)
