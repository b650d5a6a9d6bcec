"""The records of a period and their sums, as input for the rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from jengine.insight.explanations.processors import Processors
from jengine.insight.recording.records import STAGES, EngineFacts, RequestRecord, StepRecord
from jengine.insight.recording.trace import Trace
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.work import Work
from jengine.table.program_table import SamplerKey, TrunkKey, Variant

FEWEST = 20  # minimum number of steps for meaningful shares
SHORT_PAGES = 0.1  # share of free pages in the cache, below which pages are short


@dataclass(frozen=True)
class Window:
    """A trace, with sums. All seconds are of the loop while it had work, without idle time."""

    trace: Trace

    @cached_property
    def steps(self) -> list[StepRecord]:
        return self.trace.steps

    @property
    def facts(self) -> EngineFacts:
        return self.trace.facts

    @cached_property
    def costs(self) -> StepCosts:
        """Step costs under usual load."""
        return self.trace.step_costs

    @property
    def served(self) -> bool:
        """Whether the engine runs in a server's process, where it receives requests between two steps."""
        return self.trace.readers is not None

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for meaningful shares."""
        return len(self.steps) >= FEWEST and self.busy > 0.0

    # --- seconds --------------------------------------------------------------------------------------

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds by stage."""
        return {stage: sum([getattr(step, stage) for step in self.steps]) for stage in STAGES}

    @cached_property
    def busy(self) -> float:
        """Seconds of all stages."""
        return sum(self.spent.values())

    @cached_property
    def device(self) -> float:
        """Seconds of the device: measured if known, otherwise predicted."""
        return sum([step.device or step.predicted for step in self.steps])

    @cached_property
    def paused(self) -> float:
        """Seconds of Python's garbage collector."""
        return self.grown("pause_seconds")

    @cached_property
    def compiled(self) -> float:
        """Seconds of compilations."""
        return self.grown("compile_seconds")

    def grown(self, counter: str) -> float:
        """Increase of a counter of the records."""
        return getattr(self.steps[-1], counter) - getattr(self.steps[0], counter) if self.steps else 0.0

    @cached_property
    def processor(self) -> float:
        """Share of planning time in which the loop's thread had a processor. In all other stages it may wait
        for something."""
        return (
            sum([step.cpu for step in self.steps]) / self.spent["schedule"]
            if self.spent["schedule"] > 0.0
            else 1.0
        )

    @cached_property
    def processors(self) -> Processors | None:
        """The use of processors; None: unknown."""
        return (
            Processors.between(self.trace.machines, self.steps[0].begun, self.steps[-1].ended)
            if self.steps
            else None
        )

    @property
    def compiling(self) -> bool:
        """Whether programs were loaded or compiled for most of this time."""
        return self.processors is not None and self.processors.compiling > 0.5

    # --- load -----------------------------------------------------------------------------------------

    @cached_property
    def ended(self) -> list[RequestRecord]:
        """Requests that finished in this period without an abort."""
        return [
            request
            for request in self.trace.requests
            if request.ended and request.reason in ("stop", "length")
        ]

    def share(self, of: list[StepRecord]) -> float:
        """Share of these in all steps."""
        return len(of) / max(len(self.steps), 1)

    @cached_property
    def running(self) -> float:
        """Mean number of running requests."""
        return fmean([step.running for step in self.steps])

    @cached_property
    def full(self) -> list[StepRecord]:
        """Steps with the maximum number of sequences while others waited."""
        return [step for step in self.steps if step.waiting and step.running >= self.facts.max_num_seqs]

    @cached_property
    def short_of_pages(self) -> list[StepRecord]:
        """Steps in which requests waited for pages, although more sequences could run."""
        few = SHORT_PAGES * self.facts.pages
        return [
            s
            for s in self.steps
            if s.waiting and s.running < self.facts.max_num_seqs and s.free + s.cached < few
        ]

    # --- predictions ----------------------------------------------------------------------------------

    def step_seconds(self, rows: int, tiles: int = 0, work: Work | None = None, *, adapted: int = 0) -> float:
        """Seconds of a step with this number of rows and tiles, and of places of adapters, in programs of
        that size; estimated if there are none.
        """
        sampler = SamplerKey(max(rows + tiles, 1), self.variant)
        costs = self.costs
        return (
            costs.base(TrunkKey(rows, tiles, adapted=adapted))
            + costs.base(sampler)
            + costs.slopes.seconds(work or Work())
        )

    @cached_property
    def variant(self) -> Variant:
        """The sampler variant of most steps."""
        return Counter([step.sampler.variant for step in self.steps]).most_common(1)[0][0]

    def decoding(self, rows: int) -> float:
        """Seconds of a step that decodes this many rows, with the mean context of this period."""
        decoded = max(sum([step.rows * step.steps for step in self.steps]), 1)
        context = sum([step.work.context for step in self.steps]) / decoded
        longest = max([step.work.longest for step in self.steps], default=0)
        return self.step_seconds(rows, 0, Work(int(context * rows), longest))
