"""Runs many steps of the real scheduler at once, with costs looked up once, if nothing is to decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from jengine.capacity.simulation.trace import OUTPUT_TOKEN
from jengine.scheduling.costs.host_costs import HostSeconds
from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import NO_WORK, StepPlan, Work
from jengine.table.program_table import SamplerKey, TrunkKey


class ConstantPredictor(StepPredictor):
    """Looks up programs only once, since costs do not change in a replay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # seconds without work, by rows, tiles, page bucket and variant
        self._bases: dict[tuple[int, int, int, int], float] = {}

    def seconds(self, rows: int, tiles: int, work: Work, tokens: int, rank: int = 0) -> float:
        pages = self.ready.table.page_bucket(self._blocks.pages_of(tokens), tiles)
        base = self._bases.get((rows, tiles, pages, rank))
        if base is None:
            base = self._bases[rows, tiles, pages, rank] = super().seconds(rows, tiles, NO_WORK, tokens, rank)
        return base + self.costs.slopes.seconds(work)


class FastForward:
    """Steady steps of a scheduler. A steady step has the same rows as the previous step, and no prompts.

    What `schedule` and `collect` do for such a step is done here: pages (`begin`), and tokens, once for many
    steps (`advance`).

    Costs must not change, and are used under usual load.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._registry, self._admission = scheduler, scheduler.registry, scheduler.admission

    def collect(self, plan: StepPlan, tokens: list[list[int]]) -> Iterable[tuple[int, Sequence, int]]:
        """Like Scheduler.collect, but faster if a step only decodes.

        In a replay, only its length ends a sequence, and the samples of decode rows are not needed.
        """
        scheduler = self._scheduler
        if plan.prompts:
            return scheduler.collect(plan, tokens)
        by_number, fair = self._registry.by_number, self._registry.fair
        scheduler.timeline.collect(scheduler.clock())
        scheduler.cohorts.collected()
        for sample, new in zip(plan.samples, tokens, strict=True):
            sequence = by_number.get(sample.seq)
            if sequence is not None:
                known = sequence.tokens
                known += new
                sequence.in_flight -= len(new)
                if fair is not None:
                    fair.spend(sequence.client, len(new))
                if len(known) == sequence.max_len:
                    scheduler.finish(sequence, "length")
        return []

    def steps(self, plan: StepPlan, ahead: int) -> int:
        """Number of the next steps that are steady if no request arrives that `admits`, limited by `begin`.

        Steps with bursts, recurrent states or a host tier are left to the scheduler.

        Args:
            plan: the last step.
            ahead: number of dispatched steps that are not collected: 0 or 1.
        """
        registry, admission, rows = self._registry, self._admission, self.rows
        if (
            self._scheduler.table.steps > 1
            or registry.blocks.states is not None
            or registry.blocks.tier is not None
        ):
            return 0
        if (
            not rows
            or len(rows) != len(registry.running)
            or len(plan.samples) != len(rows)
            or self._scheduler.rows.sharing
        ):
            return 0
        if len(registry.held) and registry.held.batching != "static":
            return 0
        if registry.waiting and (
            admission.switches
            or admission.strategy == "latency"
            or (self._scheduler.prompts.room and self._may_admit())
        ):
            return 0
        return min([s.last_position - s.num_computed for s in rows]) - (1 - ahead)

    def _may_admit(self) -> bool:
        """Whether the first waiting sequence can be admitted before a running one ends. Without windows, free
        pages only decrease."""
        first = self._registry.waiting.first
        windows = any(self._registry.blocks.windows)
        if self._admission.strategy != "throughput" or first is None or first.in_flight or windows:
            return True
        return self._scheduler.prompts.may_fit(first)

    @property
    def admits(self) -> bool:
        """Whether an arriving request can change the next step. If not, it only joins the queue."""
        admission = self._admission
        by_load = admission.switches or admission.strategy == "latency"
        return self._scheduler.prompts.room > 0 or by_load or self._registry.options.batching != "continuous"

    @property
    def rows(self) -> list[Sequence]:
        """Rows of the last step."""
        return self._scheduler.rows.last or []

    def begin(self, now: float, entering: list[Sequence] | None, steps: int) -> bool:
        """The first part of `schedule`. Returns False if the next step may not be steady, and `schedule` must
        plan it.

        Args:
            entering: rows that enter a page in this step.
            steps: number of steady steps since the last call of `schedule`.
        """
        if self._admission.switches:
            before = self._admission.strategy
            self._admission.begin_step(now)
            if self._admission.strategy != before:
                return False
        blocks = self._registry.blocks
        for s in entering or ():
            blocks.pass_windows(s.number, s.num_computed + steps)
        if not entering:
            return True
        if not blocks.available(blocks.new_pages(len(entering))):
            return False
        for s in entering:
            blocks.grow(s.number, s.num_computed + steps + 1)
        return True

    def advance(self, steps: int, tokens: list[list[int]] | None) -> None:
        """Adds the tokens of `steps` steady steps, which have been planned and collected. tokens: by sequence
        number, the token that each of these steps sampled; None: OUTPUT_TOKEN.
        """
        same, fair = [OUTPUT_TOKEN] * steps, self._registry.fair
        for s in self.rows:
            s.num_computed += steps
            s.tokens += same if tokens is None else tokens[s.number] * steps
            if s.has_target:
                for _ in range(steps):  # one by one, so that sums of floats are the same
                    s.due += s.tpot
            if fair is not None:
                fair.spend(s.client, steps)


class StepTimes:
    """The predictions of StepCosts under usual load, which do not change.

    Attributes:
        base: device seconds of a step without work, by its trunk and its sampler.
        burst: those of a burst.
        host: see StepCosts.host_seconds.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._slopes, self.burst = costs.slopes, costs.base
        self.host: Callable[[int, int], HostSeconds] = cache(costs.host_seconds)
        self.base: Callable[[TrunkKey, SamplerKey], float] = cache(
            lambda trunk, sampler: costs.base(trunk) + costs.base(sampler)
        )

    def device(self, base: float, work: Work) -> float:
        """Device seconds of a step with these programs."""
        return base + self._slopes.seconds(work)
