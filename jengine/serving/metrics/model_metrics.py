"""Metrics of one model: its requests, counted in plain integers, and its engine's load and totals."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jengine import EngineDead, Load, RequestOutput
from jengine.spi import LOAD_COUNTERS, LOAD_GAUGES, StepTotals

# a millisecond to about eight minutes
SECONDS = tuple(factor * 10.0**power for power in range(-3, 3) for factor in (1, 2.5, 5))
# one to half a million
TOKENS = tuple(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5))


class Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


# a number, or several by the values of further labels: a text, or a tuple of texts
Values = float | Mapping[Any, float]


class Families:
    """Metrics of one model, whose name is a label of each.

    Names (after the prefix) and meanings follow vLLM where it has the same metric.

    Args:
        prefix: of the names, such as "jengine:".
    """

    def __init__(self, model: str, prefix: str) -> None:
        self.model, self.prefix = model, prefix

    def gauge(self, name: str, help: str, value: Values, *labels: str) -> Metric:
        """A gauge; with further labels, one for each set of their values."""
        return self._filled(GaugeMetricFamily, name, help, value, labels)

    def counter(self, name: str, help: str, value: Values, *labels: str) -> Metric:
        """A counter; with further labels, one for each set of their values."""
        return self._filled(CounterMetricFamily, name, help, value, labels)

    def histogram(
        self, name: str, help: str, bounds: Iterable[float], counts: Iterable[int], total: float
    ) -> Metric:
        """A histogram from counts up to each of the bounds, and beyond; `total` is the sum of its values."""
        family = HistogramMetricFamily(self.prefix + name, help, labels=("model_name",))
        sums = map(float, accumulate([*counts]))
        family.add_metric((self.model,), [*zip([*map(str, bounds), "+Inf"], sums, strict=True)], total)
        return family

    def _filled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help: str,
        value: Values,
        labels: tuple[str, ...],
    ) -> Metric:
        family = kind(self.prefix + name, help, labels=("model_name", *labels))
        for key, number in (value if isinstance(value, Mapping) else {(): value}).items():
            family.add_metric((self.model, *([key] if isinstance(key, str) else key)), number)
        return family


STORE_COUNTERS = (  # names, fields of StoreLoad, and what they are
    ("queried_pages", "queries", "Pages of prompts that were looked up in a store"),
    ("loaded_pages", "hits", "Pages that were loaded from a store"),
    ("loaded_bytes", "loaded_bytes", "Bytes of pages that were loaded from a store"),
    ("load_seconds", "loading_seconds", "Seconds that loading pages took"),
    (
        "declined_pages",
        "declined",
        "Pages that a store had and that were computed, since that is predicted to be faster",
    ),
    ("kept_pages", "kept", "Pages that were given to a store"),
    ("kept_bytes", "kept_bytes", "Bytes of pages that were given to a store"),
    ("dropped_pages", "dropped", "Pages that a store had no room or no time for"),
    ("late_prompts", "late", "Prompts that waited for a store in vain, and were computed"),
    ("failures", "failures", "Failures of a store"),
)
HISTOGRAMS = {  # by name: what they are, and their bounds
    "request_queue_time_seconds": ("From a request's arrival to its first step", SECONDS),
    "request_prefill_time_seconds": ("From a request's first step to its first token", SECONDS),
    "request_decode_time_seconds": ("From a request's first token to its last", SECONDS),
    "request_inference_time_seconds": ("From a request's first step to its last token", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not cached", TOKENS),
    "request_generation_tokens": ("Generated tokens of a completion", TOKENS),
    "request_max_num_generation_tokens": ("Generated tokens of a request's longest completion", TOKENS),
    "time_to_first_token_seconds": ("From a request's arrival to its first token", SECONDS),
    "inter_token_latency_seconds": ("Between a completion's tokens", SECONDS),
    "request_time_per_output_token_seconds": ("Between a request's tokens, its mean", SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", SECONDS),
}
UNFINISHED = "abort"  # finish reason of a request whose client has gone


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
    text = "Tokens of a page, and pages of the cache; always 1"
    config = {(str(load.page_size), str(load.pages)): 1.0}
    yield families.gauge("cache_config_info", text, config, "block_size", "num_gpu_blocks")
    free = load.free_pages - load.cached_pages
    states = {"owned": used, "cached": load.cached_pages, "free": free}
    yield families.gauge("kv_cache_pages_by_state", "Pages of the cache by state", states, "state")
    groups = dict(zip(load.cache_groups, load.hit_pages, strict=True))
    text = "Pages found in the prefix cache, by cache group"
    yield families.counter("prefix_cache_hit_pages", text, groups, "group")
    accepted = load.accepted_tokens
    text = "Tokens of drafts that became output"
    yield families.counter("spec_decode_num_accepted_tokens", text, sum(accepted))
    text = "Tokens of drafts that became output, by position in the draft"
    yield families.counter("spec_decode_num_accepted_tokens_per_pos", text, _numbered(accepted), "position")
    text = (
        "Preempted requests that resumed, by the place of their pages: on the device, on the host, or to be"
        " recomputed"
    )
    kinds = dict(zip(("cached", "swap", "recompute"), load.resumptions, strict=True))
    yield families.counter("num_preemptions_by_kind", text, kinds, "kind")
    outcomes = {outcome: getattr(load, f"targets_{outcome}") for outcome in ("met", "missed", "rejected")}
    text = "Requests with ttft_ms or tpot_ms by how they ended"
    yield families.counter("request_targets", text, outcomes, "outcome")
    text = "Steps with prompts, by strategy and the reason for their size"
    yield families.counter("step_decisions", text, dict(load.decisions), "decision")
    if (first := load.first_token_seconds) is not None:
        text = "Predicted seconds to the first token of a typical request that would arrive now"
        yield families.gauge("predicted_time_to_first_token_seconds", text, first)
    if (use := load.loras) is not None:  # with enable_lora
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        now = str(use.max_loras), ",".join(use.running), ",".join(use.waiting)
        text = (
            "Adapters that running and waiting requests use, and the most that may run; the value is the time"
        )
        yield families.gauge("lora_requests_info", text, {now: time.time()}, *labels)
        yield families.gauge("lora_adapters", "LoRA adapters in host memory", use.loaded)
    if (store := load.store) is not None:  # with kv_transfer_config
        for name, field, text in STORE_COUNTERS:
            values = {store.connector: getattr(store, field)}
            yield families.counter(f"kv_transfer_{name}", text, values, "connector")


def step_families(families: Families, totals: StepTotals) -> Iterator[Metric]:
    """Totals of steps since the start, at most a second old while the engine runs."""
    programs = {tuple(name.split("+")): count for name, count in sorted(totals.steps.items())}
    text = "Steps by the rows and prompt tiles of their program"
    yield families.counter("engine_steps", text, programs, "rows", "tiles")
    text = "Tokens computed in a step, without padding"
    computed = totals.rows + totals.prompt_tokens
    yield families.histogram("iteration_tokens_total", text, totals.token_bounds, totals.tokens, computed)
    rows = {"used": totals.rows, "padding": totals.padded_rows}
    yield families.counter("step_rows", "Decode rows of steps, with and without a sequence", rows, "state")
    tokens = {"used": totals.prompt_tokens, "padding": totals.padded_tokens}
    yield families.counter("step_prompt_tokens", "Places in prompt tiles of steps, by use", tokens, "state")
    text = "Seconds of the engine's loop, by stage; wait is for the device"
    yield families.counter("loop_seconds", text, totals.seconds, "stage")
    text = "Seconds of the device, for steps with a known duration"
    yield families.counter("device_seconds", text, totals.device_seconds)
    text = "Predicted seconds of the device, for steps with a known duration"
    yield families.counter("predicted_device_seconds", text, totals.predicted_seconds)
    text = "Collections of Python's garbage collector in the engine's process"
    yield families.counter("gc_collections", text, _numbered(totals.pauses), "generation")
    yield families.counter("gc_pause_seconds", "Seconds of garbage collections", totals.pause_seconds)
    yield families.gauge("engine_resident_memory_bytes", "Memory of the engine's process", totals.resident)


def _numbered(counts: Iterable[float]) -> dict[str, float]:
    return {str(number): count for number, count in enumerate(counts)}


class ModelMetrics:
    """All metrics of a model since the server started.

    Only the event loop writes. Prometheus's threads read, and may see some numbers before others are updated.

    Args:
        model: its name, a label of every metric.
        load: returns the engine's load; raises EngineDead if none is running.
        restarts: returns the number of engine restarts.
        totals: returns totals of the engine's steps; raises as `load`.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[], Load],
        restarts: Callable[[], int],
        totals: Callable[[], StepTotals] = StepTotals,
    ) -> None:
        self.model, self.load, self.restarts, self.totals = model, load, restarts, totals
        self.finished: Counter[str] = Counter()  # completions by finish reason
        self.prompt_tokens = self.cached_prompt_tokens = self.generation_tokens = 0
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Adds a value to one of the HISTOGRAMS, so many times."""
        self.histograms[name].add(value, times)

    def families(self, prefix: str) -> Iterator[Metric]:
        """Metrics in Prometheus's form; `prefix`: of their names."""
        of = Families(self.model, prefix)
        try:
            load, totals = self.load(), self.totals()
        except EngineDead:
            yield of.gauge("engine_up", "Whether an engine is running", 0)
        else:
            yield from load_families(of, load)
            yield from step_families(of, totals)
        yield of.counter("engine_restarts", "Restarts of the engine after it died", self.restarts())
        yield of.counter("prompt_tokens", "Prompt tokens of answered requests", self.prompt_tokens)
        yield of.counter(
            "prompt_tokens_cached", "Prompt tokens taken from the prefix cache", self.cached_prompt_tokens
        )
        yield of.counter("generation_tokens", "Generated tokens", self.generation_tokens)
        text = "Completions by finish reason"
        yield of.counter("request_success", text, dict(self.finished), "finished_reason")
        for name, (text, _) in HISTOGRAMS.items():
            values = self.histograms[name]
            yield of.histogram(name, text, values.bounds, values.counts, values.sum)


def merged(families: Iterable[Metric]) -> Iterator[Metric]:
    """Metrics of several models: those of the same name as one."""
    by_name: dict[str, Metric] = {}
    for family in families:
        if family.name in by_name:
            by_name[family.name].samples += family.samples
        else:
            by_name[family.name] = family
    return iter(by_name.values())


class RequestWatch:
    """Receives the progress of one request."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self.metrics, self.last, self.lengths = metrics, 0.0, [0]
        self.output: RequestOutput | None = None

    def tokens(self, output: RequestOutput) -> None:
        """An output with new content only (output_kind delta or final)."""
        self._grow(output, [len(completion.token_ids) for completion in output.outputs])

    def _grow(self, output: RequestOutput, news: list[int]) -> None:
        """`news`: new tokens of each completion."""
        self.output = output
        count, steps = sum(news), max(news)
        self.lengths += [0] * (len(news) - len(self.lengths))
        for i, new in enumerate(news):
            self.lengths[i] += new
        if not steps:
            if output.embedding is not None and not self.last:  # it generates no tokens
                self.last = self._first(output, time.monotonic())
            return
        now, metrics = time.monotonic(), self.metrics
        metrics.generation_tokens += count
        if not self.last:
            self.last = self._first(output, now)
            count, steps = count - sum(1 for new in news if new), steps - 1
        if steps:
            metrics.observe("inter_token_latency_seconds", (now - self.last) / steps, count)
            self.last = now

    def _first(self, output: RequestOutput, now: float) -> float:
        """The first tokens have arrived. Returns the time."""
        times, metrics = output.metrics, self.metrics
        metrics.prompt_tokens += len(output.prompt_token_ids)
        metrics.cached_prompt_tokens += output.num_cached_tokens or 0
        first = times.first_token or now
        metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
        metrics.observe(
            "request_prefill_kv_computed_tokens",
            len(output.prompt_token_ids) - (output.num_cached_tokens or 0),
        )
        if times.scheduled is not None:
            metrics.observe("request_queue_time_seconds", times.scheduled - times.arrival)
            metrics.observe("request_prefill_time_seconds", first - times.scheduled)
        metrics.observe("time_to_first_token_seconds", first - times.arrival)
        return first

    def ended(self, whole: RequestOutput | None = None) -> None:
        """Called exactly once. `whole`: everything generated, also what no output has had, since the client
        has gone.
        """
        if whole is not None:
            seen = [*self.lengths, *[0] * len(whole.outputs)]
            news = zip(whole.outputs, seen, strict=False)
            self._grow(whole, [len(completion.token_ids) - before for completion, before in news])
        metrics, output = self.metrics, self.output
        if output is None:
            metrics.finished[UNFINISHED] += 1
            return
        for completion in output.outputs:
            metrics.finished[completion.finish_reason or UNFINISHED] += 1
        for length in self.lengths:
            metrics.observe("request_generation_tokens", length)
        metrics.observe("request_max_num_generation_tokens", max(self.lengths))
        times = output.metrics
        if times.finished is None:
            return
        metrics.observe("e2e_request_latency_seconds", times.finished - times.arrival)
        if times.first_token is not None and times.scheduled is not None:
            decode = times.finished - times.first_token
            metrics.observe("request_decode_time_seconds", decode)
            metrics.observe("request_inference_time_seconds", times.finished - times.scheduled)
            if (longest := max(self.lengths)) > 1:
                metrics.observe("request_time_per_output_token_seconds", decode / (longest - 1))
