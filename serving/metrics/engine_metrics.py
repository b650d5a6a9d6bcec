"""Prometheus metrics of an engine: its load, and totals of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import Metric

from jengine import Load, StepTotals
from jengine.serving.metrics.metric_families import Families


def load_families(families: Families, load: Load) -> Iterator[Metric]:
    yield families.gauge("engine_up", "Whether an engine is running", 1)
    yield families.gauge("num_requests_running", "Running requests", load.running)
    yield families.gauge("num_requests_waiting", "Waiting requests", load.waiting)
    yield families.gauge(
        "kv_cache_usage_perc",
        "Share of the cache's pages in use; 1 is all",
        1 - load.free_pages / max(load.pages, 1),
    )
    config = (("block_size", "num_gpu_blocks"), [((str(load.page_size), str(load.pages)), 1.0)])
    yield families.gauges("cache_config_info", "Tokens of a page, and pages of the cache; always 1", *config)
    yield families.gauge("kv_cache_pages", "Pages of the cache", load.pages)
    yield families.gauge("kv_cache_free_pages", "Pages of the cache that are free", load.free_pages)
    yield families.gauge(
        "kv_cache_cached_pages", "Free pages of the cache that a prompt may still find", load.cached_pages
    )
    used = load.pages - load.free_pages
    states = [
        (("owned",), used),
        (("cached",), load.cached_pages),
        (("free",), load.free_pages - load.cached_pages),
    ]
    yield families.gauges("kv_cache_pages_by_state", "Pages of the cache by state", ("state",), states)
    yield families.counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache", load.prefix_queries
    )
    yield families.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", load.prefix_hits)
    groups = [((group,), count) for group, count in zip(load.cache_groups, load.hit_pages, strict=True)]
    yield families.counters(
        "prefix_cache_hit_pages", "Pages found in the prefix cache, by cache group", ("group",), groups
    )
    yield families.counter(
        "prefix_cache_evictions", "Cached pages that were reused for other tokens", load.evictions
    )
    yield from _host(families, load)
    yield from _store(families, load)
    yield from _speculation(families, load)
    yield from _adapters(families, load)
    yield families.counter("num_preemptions", "Preemptions of running requests", load.preemptions)
    kinds = [
        ((kind,), count)
        for kind, count in zip(("cached", "swap", "recompute"), load.resumptions, strict=True)
    ]
    text = (
        "Preempted requests that resumed, by the place of their pages: on the device, on the host, or to be"
        " recomputed"
    )
    yield families.counters("num_preemptions_by_kind", text, ("kind",), kinds)
    outcomes = [
        ((outcome,), getattr(load, f"targets_{outcome}")) for outcome in ("met", "missed", "rejected")
    ]
    yield families.counters(
        "request_targets", "Requests with ttft_ms or tpot_ms by how they ended", ("outcome",), outcomes
    )
    decisions = [((decision,), count) for decision, count in load.decisions]
    yield families.counters(
        "step_decisions",
        "Steps with prompts, by strategy and the reason for their size",
        ("decision",),
        decisions,
    )
    if (first := load.first_token_seconds) is not None:
        text = "Predicted seconds to the first token of a typical request that would arrive now"
        yield families.gauge("predicted_time_to_first_token_seconds", text, first)
    yield families.gauge("programs_ready", "Compiled programs that steps can use", load.programs_ready)
    yield families.gauge("programs", "Programs of the engine's table", load.programs)
    yield families.counter(
        "compiles_since_start", "Compilations since warm-up; each is a bug", load.compiles_since_start
    )
    yield families.counter(
        "report_faults",
        "Figures of reports that could not be computed; the log has their causes",
        load.report_faults,
    )


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


def _speculation(families: Families, load: Load) -> Iterator[Metric]:
    positions = [((str(position),), count) for position, count in enumerate(load.accepted_tokens)]
    yield families.counter("spec_decode_num_drafts", "Drafts that were verified", load.drafts)
    yield families.counter("spec_decode_num_draft_tokens", "Tokens of these drafts", load.draft_tokens)
    yield families.counter(
        "spec_decode_num_accepted_tokens", "Tokens of drafts that became output", sum(load.accepted_tokens)
    )
    yield families.counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Tokens of drafts that became output, by position in the draft",
        ("position",),
        positions,
    )


def _adapters(families: Families, load: Load) -> Iterator[Metric]:
    """Metrics of LoRA adapters, see EngineConfig.enable_lora."""
    if (use := load.loras) is None:
        return
    labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
    now = str(use.max_loras), ",".join(use.running), ",".join(use.waiting)
    text = "Adapters that running and waiting requests use, and the most that may run; the value is the time"
    yield families.gauges("lora_requests_info", text, labels, [(now, time.time())])
    yield families.gauge("lora_adapters", "LoRA adapters in host memory", use.loaded)


def _store(families: Families, load: Load) -> Iterator[Metric]:
    """Metrics of a store of pages, see EngineConfig.kv_transfer_config."""
    if (use := load.store) is None:
        return

    def counter(name: str, text: str, value: float) -> Metric:
        return families.counters(f"kv_transfer_{name}", text, ("connector",), [((use.connector,), value)])

    yield counter("queried_pages", "Pages of prompts that were looked up in a store", use.queries)
    yield counter("loaded_pages", "Pages that were loaded from a store", use.hits)
    yield counter("loaded_bytes", "Bytes of these pages", use.loaded_bytes)
    yield counter("load_seconds", "Seconds that loading them took", use.loading_seconds)
    text = "Pages that a store had and that were computed, since that is predicted to be faster"
    yield counter("declined_pages", text, use.declined)
    yield counter("kept_pages", "Pages that were given to a store", use.kept)
    yield counter("kept_bytes", "Bytes of these pages", use.kept_bytes)
    yield counter("dropped_pages", "Pages that a store had no room or no time for", use.dropped)
    yield counter("late_prompts", "Prompts that waited for a store in vain, and were computed", use.late)
    yield counter("failures", "Failures of a store", use.failures)


def _host(families: Families, load: Load) -> Iterator[Metric]:
    """Metrics of the host tier, see EngineConfig.swap_space."""
    used = load.host_used / max(load.host_pages, 1)
    yield families.gauge("cpu_cache_usage_perc", "Share of the host tier's pages in use; 1 is all", used)
    queries, hits, declined = load.host_queries, load.host_hits, load.host_declined
    yield families.counter(
        "external_prefix_cache_queries", "Prompt tokens not on the device, looked up on the host", queries
    )
    yield families.counter("external_prefix_cache_hits", "Prompt tokens fetched from the host", hits)
    yield families.counter(
        "external_prefix_cache_declined",
        "Prompt tokens found on the host but computed, since that is faster",
        declined,
    )
    yield families.counter(
        "external_prefix_cache_evictions", "Host pages that were reused for other tokens", load.host_evictions
    )
    yield families.counter("swapped_out_pages", "Pages copied to the host", load.host_spilled)
    yield families.counter("swapped_in_pages", "Pages copied from the host to the device", load.host_fetched)
