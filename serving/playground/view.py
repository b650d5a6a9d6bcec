"""The playground's view of an engine, from its records: counts and times; no texts, tokens, ids or client
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from jengine import Load, Trace

MOST_STEPS, MOST_REQUESTS = 4096, 1024  # numbers of records kept
SHOWN_STEPS = 160  # maximum steps in an event, the last ones
SHOWN_HOLDERS = 64  # maximum requests in an event, those with the most pages
SECONDS = 60.0  # period for latencies and explanations


class EngineView:
    """Accumulates an engine's traces, which may overlap. Bounded."""

    def __init__(self) -> None:
        self._steps: dict[int, Any] = {}  # by number, in order
        self._ended: dict[int, Any] = {}  # requests, likewise
        self._sent = -1  # the last step that an event included
        self._sent_at: float | None = None
        self._trace: Trace | None = None
        self._tile_size = 0

    def add(self, trace: Trace) -> None:
        """Adds recent activity. A step's last times are only known some time later, so a newer record
        replaces an older one.
        """
        self._trace = trace
        self._tile_size = self._tile_size or trace.step_costs.table.tile_size
        self._steps.update({step.number: step for step in trace.steps})
        self._ended.update({request.number: request for request in trace.requests if request.ended})
        _shorten(self._steps, MOST_STEPS)
        _shorten(self._ended, MOST_REQUESTS)

    def window(self) -> Trace | None:
        """A trace of everything known about the last seconds, for explanations."""
        trace = self._trace
        if trace is None:
            return None
        live = [request for request in trace.requests if not request.ended]
        return msgspec.structs.replace(
            trace, steps=[*self._steps.values()], requests=[*self._ended.values(), *live]
        ).last(SECONDS)

    def event(self, load: Load) -> dict[str, Any]:
        """New data since the last event, and the current state. Times are in milliseconds."""
        trace = self._trace
        if trace is None:
            return {}
        facts, tile_size = trace.facts, self._tile_size
        news = [step for number, step in self._steps.items() if number > self._sent]
        seconds = trace.taken - self._sent_at if self._sent_at is not None else 0.0
        self._sent, self._sent_at = (news[-1].number if news else self._sent), trace.taken
        decoded = sum(step.rows * step.steps for step in news)
        return {
            "facts": {
                "max_num_seqs": facts.max_num_seqs,
                "max_model_len": facts.max_model_len,
                "page_size": facts.page_size,
                "tile_size": tile_size,
            },
            "running": load.running,
            "waiting": load.waiting,
            "strategy": load.strategy,
            "tokens_per_second": round(decoded / seconds, 1) if seconds > 0.0 else None,
            "pages": self._pages(load),
            "steps": [_step(step, tile_size) for step in news[-SHOWN_STEPS:]],
            "skipped": max(len(news) - SHOWN_STEPS, 0),
            "latency": self._latency(trace.taken - SECONDS),
        }

    def _pages(self, load: Load) -> dict[str, Any]:
        """Pages by state and by holder, as (number of the request, pages). A shared page counts for each
        holder.
        """
        assert self._trace is not None
        live = [request for request in self._trace.requests if not request.ended and request.pages]
        holders = sorted([(request.number, request.pages) for request in live], key=lambda held: -held[1])
        return {
            "all": load.pages,
            "owned": load.pages - load.free_pages,
            "cached": load.cached_pages,
            "holders": sorted(holders[:SHOWN_HOLDERS]),
            "others": sum([pages for _, pages in holders[SHOWN_HOLDERS:]]),
        }

    def _latency(self, since: float) -> dict[str, Any]:
        """Latencies of the requests that ended since then."""
        ended = [
            request for request in self._ended.values() if request.ended >= since and request.first_token
        ]
        return {
            "requests": len(ended),
            "queue": percentiles([r.scheduled - r.arrival for r in ended]),
            "first_token": percentiles([r.first_token - r.arrival for r in ended]),
            "per_token": percentiles(
                [(r.ended - r.first_token) / (r.output_tokens - 1) for r in ended if r.output_tokens > 1]
            ),
            "whole": percentiles([r.ended - r.arrival for r in ended]),
        }


def percentiles(seconds: Sequence[float]) -> list[float] | None:
    """The 50th, 90th and 99th percentiles in milliseconds; None if there are no values."""
    if not seconds:
        return None
    ranked = sorted(seconds)
    return [_ms(ranked[round(share * (len(ranked) - 1))]) for share in (0.5, 0.9, 0.99)]


def _step(step: Any, tile_size: int) -> dict[str, Any]:
    """The data that the page draws for a step."""
    return {
        "n": step.number,
        "program": step.name,
        "rows": step.rows,
        "all_rows": step.trunk.rows,
        "tiles": step.tiles,
        "all_tiles": step.trunk.tiles,
        "prompt_tokens": step.prompt_tokens,
        "padded_tokens": step.padded_tokens(tile_size),
        "predicted": _ms(step.predicted),
        "measured": _ms(step.device) if step.device else None,
        "loop": _ms(step.seconds),
        "running": step.running,
        "waiting": step.waiting,
        "reason": step.reason,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def _shorten(records: dict[int, Any], most: int) -> None:
    for number in [*records][: max(len(records) - most, 0)]:
        del records[number]
