"""Summarizes a replay: percentiles of times, and the share of requests served within targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.outcome import Outcome
from jengine.capacity.simulation.trace import RequestTrace

RANKS = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Targets for requests that have none in the trace.

    Attributes:
        ttft_ms: milliseconds to the first token; None: no target.
        tpot_ms: mean milliseconds for each later output token; None: no target.
        share: share of requests that should meet their targets.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    share: float = 0.95

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise InvalidArgument(f"target_{name}", value, "must be a number of milliseconds above 0")
        if not 0.0 < self.share <= 1.0:
            raise InvalidArgument("target_share", self.share, "must be in (0, 1]")

    def given(self, trace: RequestTrace) -> bool:
        """Whether there are any targets, here or in the trace."""
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, trace.ttft_ms, trace.tpot_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySummary:
    """Figures of a replay.

    Attributes:
        requests: number of requests in the trace.
        unanswered: number of requests that were refused or rejected.
        seconds: from the first arrival to the last token.
        first_token, per_token, total: percentiles in seconds, by rank. per_token is the mean time between a
            request's tokens.
        mean_total: mean seconds from arrival to the last token.
        in_target: share of all requests that met their targets; None if there are no targets.
        device_busy, host_busy: shares of the engines' time.
        pages_mean, pages_most: shares of the cache owned by sequences.
        cached: share of prompt tokens found in the cache.
    """

    requests: int
    engines: int
    unanswered: int
    seconds: float
    first_token: dict[int, float]
    per_token: dict[int, float]
    total: dict[int, float]
    mean_total: float
    output_tokens_per_second: float
    in_target: float | None
    device_busy: float
    host_busy: float
    pages_mean: float
    pages_most: float
    preemptions: int
    cached: float
    steps: int

    @property
    def goodput(self) -> float | None:
        """Requests a second that met their targets."""
        return None if self.in_target is None else self.in_target * self.requests / self.seconds


def summarize(
    outcome: Outcome, trace: RequestTrace, targets: Targets, rows: np.ndarray | None = None
) -> ReplaySummary:
    """rows: the requests that were run, if not all."""
    rows = np.arange(len(trace)) if rows is None else rows
    first, last, outputs = (
        outcome.first[rows] - trace.arrivals[rows],
        outcome.last[rows] - trace.arrivals[rows],
        trace.outputs[rows],
    )
    answered = ~np.isnan(last)
    seconds = max(outcome.end - outcome.begin, 1e-9)
    owned = np.array([sample.owned_pages for sample in outcome.samples] or [0]) / outcome.pages
    return ReplaySummary(
        requests=len(rows),
        engines=outcome.engines,
        unanswered=int(len(rows) - answered.sum()),
        seconds=seconds,
        first_token=_percentiles(first),
        per_token=_percentiles(_gaps(first, last, outputs)),
        total=_percentiles(last),
        mean_total=float(np.mean(last[answered])) if answered.any() else float("nan"),
        output_tokens_per_second=float(outputs[answered].sum() / seconds),
        in_target=float(in_target(outcome, trace, targets)[rows].mean()) if targets.given(trace) else None,
        device_busy=outcome.device_seconds / seconds / outcome.engines,
        host_busy=outcome.host_seconds / seconds / outcome.engines,
        pages_mean=float(owned.mean()),
        pages_most=float(owned.max()),
        preemptions=int(outcome.preemptions[rows].sum()),
        cached=float(outcome.cached[rows].sum() / trace.prompts[rows].sum()),
        steps=outcome.steps,
    )


def in_target(outcome: Outcome, trace: RequestTrace, targets: Targets) -> np.ndarray:
    """For each row, whether it was served within its own targets or, if it has none, these."""
    first, last = outcome.first - trace.arrivals, outcome.last - trace.arrivals
    met: np.ndarray = ~np.isnan(last)
    for seconds, of_each, default in (
        (first, trace.ttft_ms, targets.ttft_ms),
        (_gaps(first, last, trace.outputs), trace.tpot_ms, targets.tpot_ms),
    ):
        limits = np.full(len(trace), np.inf if default is None else default)
        if of_each is not None:
            limits = np.where(np.isnan(of_each), limits, of_each)
        with np.errstate(invalid="ignore"):  # nan: a single token has no gaps
            met &= ~(1e3 * seconds > limits)
    return met


def _gaps(first: np.ndarray, last: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Mean seconds between a request's tokens; nan for a single token."""
    return np.where(outputs > 1, (last - first) / np.maximum(outputs - 1, 1), np.nan)


def _percentiles(values: np.ndarray) -> dict[int, float]:
    known = values[~np.isnan(values)]
    return (
        {rank: float(value) for rank, value in zip(RANKS, np.percentile(known, RANKS), strict=True)}
        if len(known)
        else {}
    )
