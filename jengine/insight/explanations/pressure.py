"""Rules about waiting requests: for pages, or in the queue."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, median

from jengine.insight.explanations.batches import FULL, GAIN
from jengine.insight.explanations.finding import Finding, percent, times
from jengine.insight.explanations.window import Window

PREEMPTED = 0.05  # minimum preemptions per request
SHORT = 0.3  # share of steps in which requests wait for pages
QUEUED = 0.5  # share of a request's time spent waiting


def page_pressure(window: Window) -> Finding | None:
    """The cache is too small: requests wait for pages, or are preempted and computed again."""
    if not window.enough:
        return None
    preempted, short = int(window.grown("preemptions")), window.share(window.short_of_pages)
    if preempted < max(PREEMPTED * len(window.ended), 1) and short < SHORT:
        return None
    facts, steps = window.facts, window.steps
    again = _computed_again(window)
    prompt_tokens = max(sum([step.prompt_tokens for step in steps]), 1)
    prompts = sum([step.device or step.predicted for step in steps if step.tiles])
    lost = again / prompt_tokens * prompts / window.busy
    share = max([step.owned for step in steps]) / facts.pages
    held = fmean([step.owned / max(step.running, 1) for step in steps])
    wanted = min(max([step.running + step.waiting for step in steps]), facts.max_num_seqs)
    now = max(int(window.running), 1)
    gain = max(wanted * window.decoding(now) / (now * window.decoding(wanted)), 1.0) / (1.0 - min(lost, 0.9))
    return Finding(
        "page_pressure",
        max(lost, 1.0 - 1.0 / gain),
        f"the cache is too small: {preempted} preemptions, and requests wait for pages in {percent(short)} of"
        " the steps",
        {
            "pages": f"{facts.pages} of {facts.page_size} tokens, {percent(share)} of them in use at most",
            "a sequence": f"{held:.0f} pages on average",
            "tokens computed again": str(again),
            "sequences at once": f"{window.running:.1f} of {facts.max_num_seqs}",
        },
        "num_pages",
        f"{math.ceil(1.1 * held * wanted)} pages or more (kv_cache_memory; on a GPU gpu_memory_utilization), "
        "or kv_cache_dtype=int8, which halves them; strategy=memory preempts least",
        times(gain),
    )


def _computed_again(window: Window) -> int:
    """Number of tokens of preempted requests that were computed again, beyond those of their prompts."""
    computed: Counter[int] = Counter()
    for step in window.steps:
        for number, _, length in step.chunks:
            computed[number] += length
    preempted = [request for request in window.trace.requests if request.preemptions]
    return sum([max(computed[r.number] - (r.prompt_tokens - r.cached), 0) for r in preempted])


def queueing(window: Window) -> Finding | None:
    """Requests arrive faster than the engine can serve them, and more pages or sequences would not help."""
    ended = window.ended
    if not window.enough or not ended or window.share(window.short_of_pages) >= SHORT:
        return None
    places = window.facts.max_num_seqs
    waits = [request.scheduled - request.arrival for request in ended]
    wholes = [request.ended - request.arrival for request in ended]
    if (
        2 * window.decoding(places) / window.decoding(2 * places) >= GAIN
        and window.share(window.full) >= FULL
    ):
        return None  # a case for batches_too_small
    if median([wait / max(whole, 1e-9) for wait, whole in zip(waits, wholes, strict=True)]) < QUEUED:
        return None
    arrivals = [request.arrival for request in window.trace.requests]
    seconds = max(max(arrivals) - min(arrivals), window.busy / 10)
    coming, done = len(arrivals) / seconds, 1.0 / _request_seconds(window)
    engines = math.ceil(coming / done)
    effect = (
        f"{engines} engines keep up with {coming:.1f} requests/s; one answers {done:.1f} requests/s"
        if engines > 1
        else (
            f"one engine answers {done:.1f} requests/s, and {coming:.1f} come: the queue ends by itself; two"
            " would halve it"
        )
    )
    return Finding(
        "queueing",
        sum(waits) / max(sum(wholes), 1e-9),
        f"requests wait {percent(sum(waits) / max(sum(wholes), 1e-9))} of their time for their turn",
        {
            "median wait": f"{median(waits):.2f} s",
            "median of the whole": f"{median(wholes):.2f} s",
            "requests that wait": f"{fmean([step.waiting for step in window.steps]):.1f} on average",
        },
        "replicas",
        "run more engines (`jengine simulate --replicas auto` says how many); max_waiting or on_late=reject"
        " turn requests away early",
        effect,
    )


def _request_seconds(window: Window) -> float:
    """Device seconds of a typical request, in full batches."""
    table, places = window.costs.table, window.facts.max_num_seqs
    tiles = table.max_tiles
    prompts = fmean([request.prompt_tokens - request.cached for request in window.ended])
    outputs = fmean([request.output_tokens for request in window.ended])
    prompt = (window.step_seconds(table.mixed_row_buckets[-1], tiles) - window.step_seconds(places)) / (
        tiles * table.tile_size
    )
    return max(prompts * max(prompt, 0.0) + outputs * window.decoding(places) / places, 1e-9)
