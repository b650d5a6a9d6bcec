"""What an engine's loop sees of its steps' seconds, and which of it says what a step costs."""

from __future__ import annotations

from jengine.scheduling.costs import StepCosts
from jengine.scheduling.step_plan import StepPlan


class StepClock:
    """Takes the times of a loop, all of one clock, and tells the costs what steps took.

    A device runs one step after the other. A step began when it was started or when the one before it ended, whichever came later.
    It ended when it was read, if the host had to wait for it there. If not, its end is not known and it is not counted, nor is a step
    that was started before that end was seen.
    """

    def __init__(self) -> None:
        self._ended, self._exactly = 0.0, True  # when the last step that was read had ended, and whether it ended just then
        self._planning = 0.0
        self._collected: StepPlan | None = None  # the step that was read last, while the loop goes on without a pause

    def planning(self, now: float, costs: StepCosts) -> None:
        """The loop turns to the next step."""
        self._planning, plan, self._collected = now, self._collected, None
        if plan is not None:
            costs.observe_collect(len(plan.spans), plan.trunk.tiles, now - self._ended)

    def dispatched(self, plan: StepPlan, now: float, costs: StepCosts) -> None:
        """It is planned and dispatched."""
        costs.observe_plan(len(plan.spans), plan.trunk.tiles, now - self._planning)

    def read(self, plan: StepPlan, started: float, now: float, costs: StepCosts, *, waited: bool, counts: bool) -> float:
        """Its tokens are here. Returns the seconds that it took on the device; 0.0 where they are not known.

        Args:
            started: when its first program was called.
            waited: whether they were not, when the host asked for them.
            counts: whether it was nothing but its trunk and its sampler, one right after the other.
        """
        known = waited and counts and (self._exactly or started >= self._ended)
        seconds = now - max(started, self._ended) if known else 0.0
        if known and plan.steps == 1:
            costs.observe(plan.trunk, plan.sampler, plan.work, seconds)
        elif known:
            costs.observe_burst(plan.burst, plan.work, seconds)
        self._ended, self._exactly, self._collected = now, waited, plan
        return seconds

    def pause(self) -> None:
        """Nothing is left to do: what the host does from here on is no part of a step."""
        self._collected = None
