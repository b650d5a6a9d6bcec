"""Explains an engine's speed. Each rule is a pure function of the records of its recent steps."""

from __future__ import annotations

from jengine.insight.explanations.batches import (
    batches_too_small,
    padding,
    page_pressure,
    places_of_adapters,
    prefill_interference,
    queueing,
    wrong_drafts,
)
from jengine.insight.explanations.finding import Explanation, Finding, Window
from jengine.insight.explanations.machine import (
    busy_machine,
    compilation,
    compiling,
    garbage_collection,
    host,
    masks,
    memory_growth,
    slow_readers,
)
from jengine.insight.recording.trace import Trace

__all__ = ["RULES", "Explanation", "Finding", "explain"]

RULES = (
    host,
    prefill_interference,
    page_pressure,
    batches_too_small,
    padding,
    wrong_drafts,
    places_of_adapters,
    queueing,
    slow_readers,
    masks,
    compilation,
    garbage_collection,
    memory_growth,
    busy_machine,
    compiling,
)
BUSY = 0.5  # share of time with work, below which an engine without findings counts as idle


def explain(trace: Trace) -> Explanation:
    """The engine's bottlenecks during this trace, the most expensive first."""
    window = Window(trace)
    findings = sorted(
        (finding for rule in RULES if (finding := rule(window))), key=lambda finding: -finding.share
    )
    steps = window.steps
    elapsed = steps[-1].ended - steps[0].begun if steps else 0.0
    bound = findings[0].name if findings else "device" if window.busy > BUSY * elapsed else "idle"
    shares = {stage: seconds / window.busy for stage, seconds in window.spent.items()} if window.busy else {}
    return Explanation(bound, window.busy, len(steps), shares, tuple(findings))
