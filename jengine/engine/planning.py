"""Plans the next step, and starts what must happen before it."""

from __future__ import annotations

from jengine.engine.engine_parts import ModelRunner
from jengine.insight.recording.step_recorder import StepRecorder
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan


def next_step(
    scheduler: Scheduler, runner: ModelRunner, records: StepRecorder
) -> tuple[StepPlan | None, bool]:
    """The next step, and whether pages move or images are encoded before it."""
    if scheduler.blocks.tier is not None:
        scheduler.swapped(*runner.swapped())
    plan, swaps = scheduler.schedule(), scheduler.take_swaps()
    if swaps is not None:
        runner.swap(swaps)
    encoding = scheduler.registry.images.take_encoding()
    if encoding is not None:
        runner.encode(encoding)
        records.encodes(encoding.key)
    return plan, swaps is not None or encoding is not None
