"""An engine's metrics in Python, as vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

PREFIX = "vllm:"  # scripts look for vLLM's names
# names, fields of Load, and what they are
LOAD_GAUGES = (
    ("num_requests_running", "running", "Running requests"),
    ("num_requests_waiting", "waiting", "Waiting requests"),
    ("kv_cache_pages", "pages", "Pages of the cache"),
    ("kv_cache_free_pages", "free_pages", "Pages of the cache that are free"),
    ("kv_cache_cached_pages", "cached_pages", "Free pages of the cache that a prompt may still find"),
    ("programs_ready", "programs_ready", "Compiled programs that steps can use"),
    ("programs", "programs", "Programs of the engine's table"),
)
LOAD_COUNTERS = (
    ("prefix_cache_queries", "prefix_queries", "Prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "prefix_hits", "Prompt tokens found in the prefix cache"),
    ("prefix_cache_evictions", "evictions", "Cached pages that were reused for other tokens"),
    (
        "external_prefix_cache_queries",
        "host_queries",
        "Prompt tokens not on the device, looked up on the host",
    ),
    ("external_prefix_cache_hits", "host_hits", "Prompt tokens fetched from the host"),
    (
        "external_prefix_cache_declined",
        "host_declined",
        "Prompt tokens found on the host but computed, since that is faster",
    ),
    ("external_prefix_cache_evictions", "host_evictions", "Host pages that were reused for other tokens"),
    ("swapped_out_pages", "host_spilled", "Pages copied to the host"),
    ("swapped_in_pages", "host_fetched", "Pages copied from the host to the device"),
    ("spec_decode_num_drafts", "drafts", "Drafts that were verified"),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Tokens of drafts that were verified"),
    ("num_preemptions", "preemptions", "Preemptions of running requests"),
    ("compiles_since_start", "compiles_since_start", "Compilations since warm-up; each is a bug"),
    (
        "report_faults",
        "report_faults",
        "Figures of reports that could not be computed; the log has their causes",
    ),
)


@dataclass(slots=True)
class Metric:
    """A metric of an engine.

    Attributes:
        name: with the prefix `vllm:`.
        labels: model_name.
    """

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(slots=True)
class Gauge(Metric):
    """A number that may fall."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """Counters in order, such as one for each position in a draft."""

    values: list[int]


@dataclass(slots=True)
class Histogram(Metric):
    """Counts of values.

    Attributes:
        buckets: cumulative counts by upper bound; the last bound is +Inf.
    """

    count: int
    sum: float
    buckets: dict[str, int] = field(default_factory=dict)


def get_metrics(llm: Any) -> list[Metric]:
    """The engine's metrics since its start, as in vLLM. `jengine serve --metrics-port` has more.

    Returns:
        Counter, Gauge, Vector and Histogram objects, whose names begin with `vllm:`.

    Raises:
        EngineDead: after `close`.
    """
    load, totals, labels = llm.engine.load, llm.engine.totals(), {"model_name": llm.model}
    used, accepted = load.pages - load.free_pages, [*load.accepted_tokens]
    while accepted and not accepted[-1]:  # no draft was as long
        del accepted[-1]
    bounds, counts = [*map(str, totals.token_bounds), "+Inf"], [*accumulate(totals.tokens)]
    return [
        *(Gauge(PREFIX + name, labels, getattr(load, of)) for name, of, _ in LOAD_GAUGES),
        Gauge(PREFIX + "kv_cache_usage_perc", labels, used / max(load.pages, 1)),
        *(Counter(PREFIX + name, labels, getattr(load, of)) for name, of, _ in LOAD_COUNTERS),
        Counter(PREFIX + "spec_decode_num_accepted_tokens", labels, sum(accepted)),
        Vector(PREFIX + "spec_decode_num_accepted_tokens_per_pos", labels, accepted),
        Histogram(
            PREFIX + "iteration_tokens_total",
            labels,
            counts[-1],
            totals.rows + totals.prompt_tokens,
            dict(zip(bounds, counts, strict=True)),
        ),
    ]
