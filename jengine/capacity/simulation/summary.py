"""The result of a replay, and its summary: percentiles of times, and requests within targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jengine.base.display import counted
from jengine.base.errors import InvalidArgument
from jengine.capacity.simulation.trace import RequestTrace

RANKS = (50, 90, 95, 99)
BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60  # characters in a line of bars


class EngineSample(NamedTuple):
    """The engine at one moment of a replay."""

    seconds: float
    running: int
    waiting: int
    owned_pages: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of a replay.

    Attributes:
        first, last: float64 by row of the trace: times of the first and last token, in the trace's seconds;
            nan if none came.
        preemptions, cached: int64 by row: number of preemptions, and of prompt tokens found in the cache.
        refused: number of requests that this engine can never serve.
        rejected: by reason, number of requests that ended without all of their tokens.
        steps: number of steps.
        device_seconds, host_seconds: seconds for which device and host worked.
        begin, end: start and end of the replay.
        samples: some moments of it, in order.
        pages: number of pages in an engine's cache.
        engines: number of engines that ran in parallel.
    """

    first: np.ndarray
    last: np.ndarray
    preemptions: np.ndarray
    cached: np.ndarray
    begin: float = 0.0
    end: float = 0.0
    refused: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    samples: list[EngineSample] = field(default_factory=list)
    pages: int = 0
    engines: int = 1

    @classmethod
    def empty(cls, requests: int, begin: float) -> Outcome:
        nan = np.full(requests, np.nan)
        zero = np.zeros(requests, np.int64)
        return cls(first=nan, last=nan.copy(), preemptions=zero, cached=zero.copy(), begin=begin)


def joined(outcomes: list[Outcome]) -> Outcome:
    """Combines the outcomes of several engines, each of which ran some requests of a trace. Samples are the
    first engine's."""
    first, last = np.stack([part.first for part in outcomes]), np.stack([part.last for part in outcomes])
    return Outcome(
        first=np.fmax.reduce(first),
        last=np.fmax.reduce(last),
        preemptions=np.sum([part.preemptions for part in outcomes], axis=0),
        cached=np.sum([part.cached for part in outcomes], axis=0),
        begin=min(part.begin for part in outcomes),
        end=max(part.end for part in outcomes),
        refused=sum(part.refused for part in outcomes),
        rejected=dict(sum((Counter(part.rejected) for part in outcomes), Counter())),
        steps=sum(part.steps for part in outcomes),
        device_seconds=sum(part.device_seconds for part in outcomes),
        host_seconds=sum(part.host_seconds for part in outcomes),
        samples=outcomes[0].samples,
        pages=outcomes[0].pages,
        engines=sum(part.engines for part in outcomes),
    )


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


def summarize(outcome: Outcome, trace: RequestTrace, targets: Targets) -> ReplaySummary:
    """The figures of a replay of the whole trace."""
    first, last, outputs = outcome.first - trace.arrivals, outcome.last - trace.arrivals, trace.outputs
    answered = ~np.isnan(last)
    seconds = max(outcome.end - outcome.begin, 1e-9)
    owned = np.array([sample.owned_pages for sample in outcome.samples] or [0]) / outcome.pages
    return ReplaySummary(
        requests=len(trace),
        engines=outcome.engines,
        unanswered=int(len(trace) - answered.sum()),
        seconds=seconds,
        first_token=_percentiles(first),
        per_token=_percentiles(_gaps(first, last, outputs)),
        total=_percentiles(last),
        mean_total=float(np.mean(last[answered])) if answered.any() else float("nan"),
        output_tokens_per_second=float(outputs[answered].sum() / seconds),
        in_target=float(in_target(outcome, trace, targets).mean()) if targets.given(trace) else None,
        device_busy=outcome.device_seconds / seconds / outcome.engines,
        host_busy=outcome.host_seconds / seconds / outcome.engines,
        pages_mean=float(owned.mean()),
        pages_most=float(owned.max()),
        preemptions=int(outcome.preemptions.sum()),
        cached=float(outcome.cached.sum() / trace.prompts.sum()),
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
    if len(known):
        return {rank: float(value) for rank, value in zip(RANKS, np.percentile(known, RANKS), strict=True)}
    return {}


def report(summary: ReplaySummary, trace: RequestTrace, targets: Targets, outcome: Outcome) -> str:
    """The report as text with several lines."""
    lines = [
        f"{counted(summary.requests, 'request')}, {_arrivals(trace)}; {counted(summary.engines, 'engine')}",
        "",
        f"{'':24}" + "".join(f"{f'p{rank}':>10}" for rank in RANKS),
        _row("first token, ms", summary.first_token),
        _row("per output token, ms", summary.per_token),
        _row("total, ms", summary.total),
        "",
        (
            f"{summary.output_tokens_per_second:,.0f} output tokens a second; completed in"
            f" {summary.seconds:.1f} s"
        ),
    ]
    if summary.unanswered:
        reasons = [f"{outcome.refused} too long for this engine"] if outcome.refused else []
        reasons += [f"{count} {reason}" for reason, count in sorted(outcome.rejected.items())]
        lines.append(f"{counted(summary.unanswered, 'request')} not answered: {', '.join(reasons)}")
    if summary.in_target is not None:
        lines.append(
            f"goodput: {summary.goodput:.3g} requests a second, {summary.in_target:.1%} of all,"
            f" {_targets(targets)}"
        )
    lines += [
        (
            f"device busy {summary.device_busy:.0%}, host {summary.host_busy:.0%};"
            f" {counted(summary.steps, 'step')}; pages in use {summary.pages_mean:.0%} on average,"
            f" {summary.pages_most:.0%} at most"
        ),
        (
            f"{counted(summary.preemptions, 'preemption')}; {summary.cached:.1%} of prompt tokens found in"
            " the prefix cache"
        ),
        "",
        *_timeline(outcome, trace),
    ]
    return "\n".join(lines)


def _arrivals(trace: RequestTrace) -> str:
    if trace.seconds < 1.0:
        return f"all within {1e3 * trace.seconds:.2g} ms"
    return f"{len(trace) / trace.seconds:.3g} a second for {trace.seconds:.0f} s"


def _row(name: str, values: dict[int, float]) -> str:
    return f"{name:24}" + "".join(
        f"{1e3 * values[rank]:>10,.1f}" if values else f"{'-':>10}" for rank in RANKS
    )


def _targets(targets: Targets) -> str:
    named = ((targets.ttft_ms, "to the first token"), (targets.tpot_ms, "per output token"))
    parts = [f"{value:g} ms {what}" for value, what in named if value is not None]
    return "within " + (" and ".join(parts) if parts else "the trace's targets")


def _timeline(outcome: Outcome, trace: RequestTrace) -> list[str]:
    """Changes over time, as bars."""
    at = np.array([sample.seconds for sample in outcome.samples])
    came = ~np.isnan(outcome.first)
    lines = [
        bars("running", at, [sample.running for sample in outcome.samples]),
        bars("waiting", at, [sample.waiting for sample in outcome.samples]),
        bars("first token, ms", trace.arrivals[came], 1e3 * (outcome.first - trace.arrivals)[came]),
    ]
    if outcome.engines > 1:
        lines[:2] = [line + ", first engine" for line in lines[:2]]
    return lines


def bars(name: str, at: np.ndarray, values: Sequence[float] | np.ndarray) -> str:
    """Mean values over time, `WIDTH` characters wide."""
    known = np.asarray(values, np.float64)
    if not len(known):
        return f"{name:16}{'':{WIDTH}} nothing"
    span = max(float(at.max() - at.min()), 1e-9)
    place = np.minimum(((at - at.min()) / span * WIDTH).astype(int), WIDTH - 1)
    counts = np.bincount(place, minlength=WIDTH)
    means = np.bincount(place, weights=known, minlength=WIDTH) / np.maximum(counts, 1)
    highest = means.max()
    heights = np.ceil(means / highest * (len(BARS) - 1)).astype(int) if highest > 0 else np.zeros(WIDTH, int)
    return f"{name:16}{''.join(BARS[height] for height in heights)} at most {known.max():,.4g}"
