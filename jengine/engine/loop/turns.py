"""An iteration of an engine's loop whose step the caller dispatches: alone, or with those of other ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Literal, NamedTuple

from jengine.core.updates import Update
from jengine.engine.loop.engine_parts import Arrivals
from jengine.engine.page_transfer import PageTransfer
from jengine.execution.runner import InFlight, PendingSample, Runner
from jengine.insight.recording.step_recorder import StepRecorder
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import VARIANTS
from jengine.table.ready_programs import Demand, ReadyPrograms, by_demand

# what was dispatched of a turn's step; None: nothing is left but to read the oldest step in flight, which is
# another rank's if "passed"
Begun = InFlight | PendingSample | Literal["passed"] | None
BATCH_POLL_SECONDS = 0.005


class Wanted(NamedTuple):
    """A step to dispatch; only its trunk if it is masked, since masks depend on tokens that are not read."""

    plan: StepPlan
    masked: bool


# yields once, the step or None, takes what was dispatched, and returns the previous step's updates
Turn = Generator[Wanted | None, Begun, list[Update]]


def ended(turn: Turn, begun: Begun) -> list[Update]:
    """The updates of a turn whose step was dispatched."""
    try:
        turn.send(begun)
    except StopIteration as end:
        updates: list[Update] = end.value
        return updates
    raise AssertionError("a turn has one step")


def next_step(
    scheduler: Scheduler, runner: Runner, records: StepRecorder, pages: PageTransfer | None
) -> tuple[StepPlan | None, bool]:
    """The next step, and whether pages move or images are encoded before it."""
    if pages is not None:
        pages.settle()
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


def take_programs(scheduler: Scheduler, programs: Arrivals, taken: int) -> int:
    """Gives newly ready programs to the scheduler, and asks for those that its requests need most. Returns
    the number of those that it has.

    Args:
        taken: number of those that it had.
    """
    if (ready := programs.ready) == taken:
        return taken
    table = scheduler.table
    keys = [key for key in programs.usable() if not isinstance(key, str)]
    scheduler.predictor.ready = ReadyPrograms(table, keys)
    if missing := {*table.all_keys()}.difference(keys):
        programs.prefer(by_demand(table, missing, _demand(scheduler)))
    return ready


def _demand(scheduler: Scheduler) -> Demand:
    """The demand of the running sequences, and of those that could run beside them."""
    running, waiting = scheduler.registry.snapshot()
    soon = [*running, *waiting[: max(scheduler.registry.max_num_seqs - len(running), 0)]]
    tokens = sum(max(sequence.prompt_len - sequence.num_computed, 0) for sequence in soon)
    ranks = {sequence.variant_rank for sequence in soon} or {len(VARIANTS) - 1}
    variants = tuple(VARIANTS[rank] for rank in sorted(ranks))
    return Demand(len(soon), -(-tokens // scheduler.table.tile_size), variants)


def wait_for_work(scheduler: Scheduler, runner: Runner, pages: PageTransfer | None) -> None:
    """Waits a moment for what a step needs: pages, or the rest of a batch. New requests end the wait soon."""
    if scheduler.registry.fetching:
        runner.wait_for_staged()
        return
    wait = scheduler.wakes_at - scheduler.clock()
    if pages is not None and pages.waits:
        pages.wait()
    elif 0.0 < wait < math.inf:
        time.sleep(min(wait, BATCH_POLL_SECONDS))
