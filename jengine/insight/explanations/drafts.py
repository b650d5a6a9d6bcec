"""A rule about speculation."""

from __future__ import annotations

from jengine.insight.explanations.finding import Finding, ms, percent, times
from jengine.insight.explanations.window import Window
from jengine.insight.recording.records import StepRecord

LOST = 0.05  # share of the time of steps with drafts


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
