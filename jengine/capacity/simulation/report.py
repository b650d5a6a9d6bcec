"""Shows a replay as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jengine.base.display import counted
from jengine.capacity.simulation.outcome import Outcome
from jengine.capacity.simulation.summary import RANKS, ReplaySummary, Targets
from jengine.capacity.simulation.trace import RequestTrace

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 60  # characters in a line of bars


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
        lines.append(_unanswered(summary, outcome))
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


def _unanswered(summary: ReplaySummary, outcome: Outcome) -> str:
    reasons = [f"{outcome.refused} too long for this engine"] if outcome.refused else []
    reasons += [f"{count} {reason}" for reason, count in sorted(outcome.rejected.items())]
    return f"{counted(summary.unanswered, 'request')} not answered: {', '.join(reasons)}"


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
