"""Measures step durations in the engine loop, and decides which of them may update step costs."""

from __future__ import annotations

from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.step_plan import StepPlan
from jengine.table.program_table import TrunkKey


class StepClock:
    """Takes the loop's times, all from one clock, and reports step durations to the costs.

    A device runs one step after the other. A step begins when it is dispatched or when the previous one ends,
    whichever is later. It ends when the host reads it, if the host had to wait. Otherwise its end is unknown,
    and neither this step nor a step that was started before its end was seen is counted.

    In a pipeline, steps end one stage's seconds after each other while all stages have work, if they run the
    same program. Other steps are not counted: one that is longer than the one before reaches the last stage
    late.
    """

    def __init__(self, stages: int = 1) -> None:
        self._stages = stages
        self._trunk: TrunkKey | None = None  # of the last step that was read
        self._ended, self._exactly = 0.0, True  # end of the last step that was read, and whether it is exact
        self._planning = 0.0
        # the last step that was read, while the loop runs without a pause
        self._collected: StepPlan | None = None

    def planning(self, now: float, costs: StepCosts) -> None:
        """The loop starts to plan the next step."""
        self._planning, plan, self._collected = now, self._collected, None
        if plan is not None:
            costs.observe_collect(len(plan.spans), plan.trunk.tiles, now - self._ended)

    def dispatched(self, plan: StepPlan, now: float, costs: StepCosts) -> None:
        """A step has been planned and dispatched."""
        costs.observe_plan(len(plan.spans), plan.trunk.tiles, now - self._planning)

    def read(
        self, plan: StepPlan, started: float, now: float, costs: StepCosts, *, waited: bool, counts: bool
    ) -> float:
        """A step's tokens have arrived. Returns its device seconds; 0.0 if unknown.

        Args:
            started: time of the call of its first program.
            waited: whether the host had to wait for the tokens.
            counts: whether the step ran only its drafts, its trunk and its sampler, back to back, and began
                while all stages had work.
        """
        known = waited and counts and (self._exactly or started >= self._ended)
        known = known and (self._stages == 1 or plan.trunk == self._trunk)
        self._trunk = plan.trunk
        seconds = now - max(started, self._ended) if known else 0.0
        if known and plan.steps == 1:
            costs.observe(plan.trunk, plan.sampler, plan.work, seconds, plan.draft)
        elif known:
            costs.observe_burst(plan.burst, plan.work, seconds)
        self._ended, self._exactly, self._collected = now, waited, plan
        return seconds

    def pause(self) -> None:
        """Nothing is left to do. Host time from here on does not belong to a step."""
        self._collected = None
