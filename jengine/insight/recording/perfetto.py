"""Records as events of Chrome's trace event format, which Perfetto reads:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

An event is a dict. Its `ph` is the type: X is a slice with `ts` and `dur` in microseconds, C a set of
counters, i an instant, M a name. A lane is a pair of `pid` and `tid`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from jengine.insight.recording.records import RESUMPTIONS, STAGES, Pause, RequestRecord, StepRecord

Event = dict[str, Any]
ENGINE, REQUESTS = 1, 2  # process ids
DEVICE, PAUSES = len(STAGES) + 1, len(STAGES) + 2  # lanes of the engine, after those of the stages
LANES = ("device", *STAGES, "garbage collector")  # from top to bottom


def trace_events(
    steps: list[StepRecord], requests: list[RequestRecord], pauses: list[Pause], tile_size: int
) -> list[Event]:
    """All events. Time 0 is when the first of these began."""
    firsts = (
        [step.begun for step in steps[:1]]
        + [pause.begun for pause in pauses[:1]]
        + [request.arrival for request in requests]
    )
    begun = min(firsts, default=0.0)
    end = max([step.ended for step in steps[-1:]] + [request.ended for request in requests], default=begun)
    spans = [device_span(step, before) for before, step in zip([None, *steps], steps, strict=False)]
    events = [*_names(requests)]
    for step, span in zip(steps, spans, strict=True):
        events += _step(step, span, tile_size)
    events += [event for before, step in pairwise(steps) for event in _instants(before, step)]
    for pause in pauses:
        args = {"generation": pause.generation, "collected": pause.collected}
        events.append(
            _slice(ENGINE, PAUSES, f"generation {pause.generation}", pause.begun, pause.seconds, args)
        )
    events += _requests(requests, steps, spans, end)
    for event in events:
        if "ts" in event:
            event["ts"] = round(1e6 * (event["ts"] - begun), 3)
    return events


def device_span(step: StepRecord, before: StepRecord | None) -> tuple[float, float]:
    """Start and end of a step on the device.

    If they were not measured, an upper estimate: from the call of its sampler, or the end of the previous
    step, until it was read.
    """
    began = step.ended - step.device if step.device else max(step.dispatched, before.ended if before else 0.0)
    return min(began, step.ended), step.ended


def stage_begins(step: StepRecord) -> dict[str, float]:
    """Start of each stage of a step."""
    return {
        "schedule": step.begun,
        "pack": step.begun + step.schedule,
        "dispatch": step.begun + step.schedule + step.pack,
        "mask": step.dispatched - step.mask,
        "wait": step.ended - step.wait,
        "collect": step.ended,
        "text": step.ended + step.collect,
        "away": step.ended + step.collect + step.text,
    }


def _names(requests: list[RequestRecord]) -> Iterator[Event]:
    yield _name(ENGINE, None, "jengine")
    tids = (DEVICE, *range(1, len(STAGES) + 1), PAUSES)
    for place, (tid, name) in enumerate(zip(tids, LANES, strict=True)):
        yield _name(ENGINE, tid, name)
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": ENGINE,
            "tid": tid,
            "args": {"sort_index": place},
        }
    yield _name(REQUESTS, None, "requests")
    for request in requests:
        yield _name(REQUESTS, request.number + 1, f"request {request.request_id}")


def _step(step: StepRecord, span: tuple[float, float], tile_size: int) -> Iterator[Event]:
    named = {"step": step.number}
    args = {
        **named,
        "program": step.name,
        "rows": step.rows,
        "rows of prompts": step.prompt_rows,
        "drafts": step.drafts,
        "accepted drafts": step.accepted,
        "padded rows": step.padded_rows,
        "tiles": step.tiles,
        "prompt tokens": step.prompt_tokens,
        "padded tokens": step.padded_tokens(tile_size),
        "context": step.work.context,
        "patches of images": step.patches,
        "predicted ms": round(1e3 * step.predicted, 4),
        "measured ms": round(1e3 * step.device, 4) if step.device else "not known",
        "strategy": step.strategy,
        "reason": step.reason,
    }
    yield _slice(ENGINE, DEVICE, step.name, span[0], span[1] - span[0], args)
    begun = stage_begins(step)
    for tid, stage in enumerate(STAGES, 1):
        if seconds := getattr(step, stage):
            yield _slice(ENGINE, tid, stage, begun[stage], seconds, named)
    yield _count("requests", step.dispatched, running=step.running, waiting=step.waiting)
    yield _count("pages", step.dispatched, owned=step.owned, cached=step.cached, free=step.free)
    computed = step.rows + step.prompt_tokens
    padding = step.padded_rows + step.padded_tokens(tile_size)
    yield _count("tokens of a step", step.dispatched, computed=computed, padding=padding)
    yield _count("drift", step.dispatched, factor=round(step.drift, 4))


def _instants(before: StepRecord, step: StepRecord) -> Iterator[Event]:
    """Events that happened since the previous step."""
    resumed = [
        (f"resumption ({kind})", now - then)
        for kind, now, then in zip(RESUMPTIONS, step.resumptions, before.resumptions, strict=True)
    ]
    counts = [
        ("preemption", step.preemptions - before.preemptions),
        *resumed,
        ("compilation", step.compiles - before.compiles),
    ]
    for name, count in counts:
        if count:
            event = {"ph": "i", "s": "p", "name": name, "pid": ENGINE, "tid": 1, "ts": step.dispatched}
            yield {**event, "args": {"count": count, "step": step.number}}
    spilled, fetched = step.spills - before.spills, step.fetches - before.fetches
    if step.spills or step.fetches:
        yield _count("pages moved", step.dispatched, to_host=spilled, from_host=fetched)


def _requests(
    requests: list[RequestRecord], steps: list[StepRecord], spans: list[tuple[float, float]], end: float
) -> Iterator[Event]:
    """Slices of each request: queue, prompt and output, with the steps that computed its prompt."""
    known = {}
    for request in requests:
        ended = request.ended or end
        lane = known[request.number] = request.number + 1, request.arrival, ended
        marks = [request.arrival, request.scheduled or ended, request.first_token or ended, ended]
        args = {
            "prompt tokens": request.prompt_tokens,
            "cached": request.cached,
            "output tokens": request.output_tokens,
            "preemptions": request.preemptions,
            "client": request.client,
            "adapter": request.lora,
            "reason": request.reason or "unfinished",
        }
        for name, (start, stop) in zip(("queue", "prefill", "decode"), pairwise(marks), strict=True):
            if stop > start:
                yield _slice(REQUESTS, lane[0], name, start, stop - start, args)
    for step, span in zip(steps, spans, strict=True):
        for number, position, length in step.chunks:
            if number in known:
                tid, first, last = known[number]
                start, stop = max(span[0], first), min(span[1], last)
                args = {"step": step.number, "position": position, "tokens": length}
                if stop > start:
                    yield _slice(REQUESTS, tid, f"{length} tokens", start, stop - start, args)


def _slice(pid: int, tid: int, name: str, start: float, seconds: float, args: Event) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": round(1e6 * seconds, 3),
        "args": args,
    }


def _count(name: str, at: float, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": ENGINE, "ts": at, "args": values}


def _name(pid: int, tid: int | None, name: str) -> Event:
    what = "process_name" if tid is None else "thread_name"
    return {
        "ph": "M",
        "name": what,
        "pid": pid,
        "args": {"name": name},
        **({} if tid is None else {"tid": tid}),
    }
