"""Bursts: several decode steps in a row that do not need the host: when, and how long for each row."""

from __future__ import annotations

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.step_plan import Work
from jengine.table.program_table import VARIANTS

LONGEST = 0.1  # predicted seconds of a burst with num_scheduler_steps="auto"


class Bursts(Rule):
    """Turns a decode step into a burst, if its program is ready, no row needs the host, and there are enough
    pages.

    With num_scheduler_steps="auto", also requires that nothing is waiting, and that the burst is short: a
    stream's tokens arrive together.
    """

    def __init__(self, registry: Registry, predictor: StepPredictor) -> None:
        self._registry, self._blocks, self._predictor = registry, registry.blocks, predictor
        self._steps, self._auto = predictor.ready.table.steps, registry.options.num_scheduler_steps == "auto"

    def lengthen(self, plan: PlanBuilder) -> None:
        rows, steps, blocks = plan.rows, self._steps, self._blocks
        if steps == 1 or plan.tiles or plan.more_rows:
            return
        variant = VARIANTS[plan.rank]
        if variant == VARIANTS[-1] or (
            self._auto and (self._registry.num_waiting or self._registry.fetching)
        ):
            return
        lengths = [min(steps, s.last_position - s.num_computed) for s in rows]
        if blocks.states is not None:  # the state at a burst's end is the only one that can be kept
            until, tile_size = blocks.states.until_grid, self._predictor.tile_size
            lengths = [
                min(length, until(s.num_computed, tile_size)) for s, length in zip(rows, lengths, strict=True)
            ]
        if max(lengths) < steps:
            return
        ready = self._predictor.ready
        trunk = ready.trunk(
            len(rows),
            0,
            blocks.pages_of(self._registry.limits.longest_after(plan.longest, steps)),
            len(rows),
            adapted=plan.adapted,
        )
        burst = ready.burst(trunk, variant)
        if burst is None:
            return
        work = Work(
            plan.work.context * steps + len(rows) * steps * (steps - 1) // 2,
            (plan.work.longest + steps // 2) * steps,
        )
        if self._auto and self._predictor.costs.added_seconds(burst, work) > LONGEST:
            return
        ends = [s.num_computed + length for s, length in zip(rows, lengths, strict=True)]
        growing = [
            (s, end)
            for s, end in zip(rows, ends, strict=True)
            if blocks.pages_of(end) > blocks.pages_of(s.num_computed + 1)
        ]
        for sequence, _ in growing:
            blocks.pass_windows(sequence.number, sequence.certain)
        wanted = sum([blocks.pages_of(end) - blocks.pages_of(s.num_computed + 1) for s, end in growing])
        if not blocks.available(blocks.new_pages(wanted)):
            return
        for sequence, end in growing:
            plan.enter(sequence.slot, blocks.grow(sequence.number, end))
        for span, length in zip(plan.spans, lengths, strict=True):
            span.length = length
        plan.work, plan.steps, plan.lengthened = work, steps, True
