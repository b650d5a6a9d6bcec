"""Rules about the contents of steps (prompts that delay decoding, small batches, padding, places of adapters,
drafts), and about waiting requests: for pages, or in the queue.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from jengine.insight.explanations.finding import Finding, Window, ms, percent, times
from jengine.insight.recording.records import RequestRecord, StepRecord

COSTLY = 0.15  # share of the device's time that unused places of adapters take
LOST = 0.05  # share of the time of steps with drafts, which wrong drafts cost
INTERFERENCE = 0.4  # share of decoding time that prompts take
LONGER = 1.5  # minimum factor by which these steps are longer than without prompts
GAIN = 1.2  # minimum gain in tokens a second that justifies a larger batch
FULL = 0.5  # share of steps with the maximum number of sequences
ALONE = 2.0  # with fewer concurrent requests on average, there is no real batching
# share of requests that arrive right after another has ended, and the maximum delay relative to their
# duration
IN_TURN, AT_ONCE = 0.7, 0.1
FEW_REQUESTS = 5
PADDED = 0.2  # share of device time
PREEMPTED = 0.05  # minimum preemptions per request
SHORT = 0.3  # share of steps in which requests wait for pages
QUEUED = 0.5  # share of a request's time spent waiting


def prefill_interference(window: Window) -> Finding | None:
    """Streams wait while prompts are computed."""
    if not window.enough:
        return None
    decoding = [step for step in window.steps if step.rows > step.prompt_rows]
    mixed = [step for step in decoding if step.tiles]
    if not mixed:
        return None

    def alone(step: StepRecord) -> float:
        work, adapted = step.work._replace(attended=0), step.trunk.adapted
        return window.step_seconds(step.trunk.rows, 0, work, adapted=adapted) * step.drift

    extra = sum([max(step.predicted - alone(step), 0.0) for step in mixed])
    whole = sum([step.device or step.predicted for step in decoding])
    longer = fmean([step.predicted for step in mixed]) / fmean([alone(step) for step in mixed])
    if extra < INTERFERENCE * whole or longer < LONGER:
        return None
    longest = max(mixed, key=lambda step: step.predicted)
    half = -(-longest.trunk.tiles // 2)
    budget = window.facts.max_num_seqs + half * window.costs.table.tile_size
    less = (
        window.step_seconds(
            longest.trunk.rows,
            half,
            longest.work._replace(attended=longest.work.attended // 2),
            adapted=longest.trunk.adapted,
        )
        * longest.drift
    )
    return Finding(
        "prefill_interference",
        extra / whole,
        f"prompts take {percent(extra / whole)} of the time in which streams wait for their next tokens",
        {
            "steps with prompts beside streams": percent(window.share(mixed)),
            "such a step": ms(fmean([step.predicted for step in mixed])),
            "without its prompts": ms(fmean([alone(step) for step in mixed])),
            "the longest": ms(longest.predicted),
        },
        "max_num_batched_tokens",
        f"{budget} takes half as many tiles into a step; or strategy=latency with tpot_ms lets streams set"
        " the pace",
        f"the longest wait between tokens falls from {ms(longest.predicted)} to {ms(less)}",
    )


def batches_too_small(window: Window) -> Finding | None:
    """More concurrent sequences would give more tokens a second."""
    if not window.enough or window.short_of_pages:
        return None
    return _too_few_places(window) or _one_after_the_other(window)


def _too_few_places(window: Window) -> Finding | None:
    places = window.facts.max_num_seqs
    gain = 2 * window.decoding(places) / window.decoding(2 * places)
    if window.share(window.full) < FULL or gain < GAIN:
        return None
    waiting = fmean([step.waiting for step in window.full])
    return Finding(
        "batches_too_small",
        1.0 - 1.0 / gain,
        f"all {places} places are taken while {waiting:.0f} requests wait, and larger batches would cost"
        " little more",
        {
            "steps with all places taken": percent(window.share(window.full)),
            f"a step of {places} rows": ms(window.decoding(places)),
            f"of {2 * places} rows": ms(window.decoding(2 * places)),
        },
        "max_num_seqs",
        f"{2 * places} sequences at once; the cache must hold them, see num_pages",
        times(gain),
    )


def _one_after_the_other(window: Window) -> Finding | None:
    requests = sorted(window.ended, key=lambda request: request.arrival)
    pairs = list(pairwise(requests))
    in_turn = [after for before, after in pairs if _right_after(before, after)]
    if len(requests) < FEW_REQUESTS or window.running > ALONE or len(in_turn) < IN_TURN * len(pairs):
        return None
    rows = min(8, window.facts.max_num_seqs)
    gain = rows * window.decoding(1) / window.decoding(rows)
    if gain < GAIN:
        return None
    return Finding(
        "batches_too_small",
        1.0 - 1.0 / gain,
        f"requests come one after the other: {window.running:.1f} run at once",
        {
            "requests that came right after another had ended": percent(len(in_turn) / len(pairs)),
            "a step of 1 row": ms(window.decoding(1)),
            f"of {rows} rows": ms(window.decoding(rows)),
        },
        "requests at once",
        "give `generate` a list of prompts, or send requests from several threads or connections",
        times(gain) + f" with {rows} at once",
    )


def _right_after(before: RequestRecord, after: RequestRecord) -> bool:
    gap = after.arrival - before.ended
    return 0.0 <= gap <= AT_ONCE * (before.ended - before.arrival)


def padding(window: Window) -> Finding | None:
    """Programs have more rows or prompt tokens than there is work for, though smaller ones are ready."""
    if not window.enough or window.compiling:
        return None
    size, least = window.costs.table.tile_size, window.costs.table.row_buckets[0]
    rows = tiles = whole = 0.0
    for step in window.steps:
        trunk, used = step.trunk, max(step.rows, min(least, step.trunk.rows))
        seconds = window.costs.base(trunk)
        whole += seconds * step.steps
        if used < trunk.rows:
            rows += max(seconds - window.costs.base(replace(trunk, rows=used)), 0.0) * step.steps
        if trunk.tiles:
            bare = window.costs.base(replace(trunk, tiles=0))
            tiles += max(seconds - bare, 0.0) * step.padded_tokens(size) / (trunk.tiles * size)
    if rows + tiles < PADDED * whole:
        return None
    max_rows = max([step.rows for step in window.steps])
    by_rows = rows >= tiles
    gain = whole / (whole - (rows if by_rows else tiles))
    computed = sum([step.rows + step.prompt_tokens for step in window.steps])
    padded = sum([step.padded_rows + step.padded_tokens(size) for step in window.steps])
    return Finding(
        "padding",
        (rows + tiles) / whole,
        f"padding takes {percent((rows + tiles) / whole)} of the device's time",
        {
            "tokens of steps that are padding": percent(padded / (padded + computed)),
            "rows' share of the time": percent(rows / whole),
            "tiles' share of the time": percent(tiles / whole),
            "most rows in a step": str(max_rows),
        },
        "max_num_seqs" if by_rows else "tile_size",
        (
            f"{max(-(-max_rows // 8) * 8, 8)}: programs have at most so many rows"
            if by_rows
            else f"{max(size // 2, 16)}: a prompt's last tile is padded by less"
        ),
        times(gain) + ", at most",
    )


def places_of_adapters(window: Window) -> Finding | None:
    """Steps compute more places of adapters than requests use."""
    table = window.costs.table
    steps = [step for step in window.steps if step.trunk.adapted]
    used = {request.lora for request in window.trace.requests if request.lora}
    if not window.enough or table.batch_invariant or not steps or not 0 < len(used) < table.adapters:
        return None
    costs = window.costs
    extra = sum([(costs.base(s.trunk) - costs.base(replace(s.trunk, adapted=0))) * s.steps for s in steps])
    if extra < COSTLY * window.device:
        return None
    longest = max(steps, key=lambda step: costs.base(step.trunk)).trunk
    return Finding(
        "places_of_adapters",
        extra / window.device,
        f"LoRA adapters take {percent(extra / window.device)} of the device's time, and there are places for"
        f" more of them than are used",
        {
            "steps with adapters": percent(window.share(steps)),
            "adapters in use, and places": f"{len(used)} and {table.adapters}",
            f"the longest, {longest}": ms(costs.base(longest)),
            "the same without adapters": ms(costs.base(replace(longest, adapted=0))),
        },
        "max_loras",
        f"{len(used)}: steps compute all places, whichever are in use; a smaller max_lora_rank helps as well",
        f"up to {percent(extra / window.device)} less time",
    )


def wrong_drafts(window: Window) -> Finding | None:
    """Steps with drafts give fewer tokens a second than they would without."""
    steps = [step for step in window.steps if step.drafts]
    if not window.enough or not steps:
        return None

    def alone(step: StepRecord) -> float:
        rows, share = step.rows - step.drafts, 1.0 - step.drafts / step.rows
        work = step.work._replace(context=int(step.work.context * share))
        return window.step_seconds(rows, step.tiles, work, adapted=step.trunk.adapted) * step.drift

    drafts, accepted = sum([step.drafts for step in steps]), sum([step.accepted for step in steps])
    with_drafts = sum([step.device or step.predicted for step in steps])
    without = sum([alone(step) * step.generated / max(step.generated - step.accepted, 1) for step in steps])
    lost = with_drafts - without  # seconds for the same tokens
    if lost < LOST * with_drafts:
        return None
    return Finding(
        "wrong_drafts",
        lost / window.busy,
        f"{percent(1 - accepted / drafts)} of the drafts are wrong, and verifying them takes longer than they"
        " save",
        {
            "steps with drafts": percent(window.share(steps)),
            "such a step": ms(with_drafts / len(steps)),
            "without its drafts": ms(sum(map(alone, steps)) / len(steps)),
            "tokens of such a step": f"{sum([step.generated for step in steps]) / len(steps):.1f}",
        },
        "speculative_config",
        "auto lets the costs of steps decide; none leaves drafts out",
        times(window.busy / (window.busy - lost)),
    )


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
