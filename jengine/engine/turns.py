"""An iteration of an engine's loop whose step the caller dispatches: alone, or with those of other ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, NamedTuple

from jengine.core.updates import Update
from jengine.execution.runner import InFlight, PendingSample
from jengine.scheduling.step_plan import StepPlan


class Wanted(NamedTuple):
    """A step to dispatch; only its trunk if it is masked, since masks depend on tokens that are not read."""

    plan: StepPlan
    masked: bool


# what was dispatched of a turn's step; None: nothing is left but to read the oldest step in flight, which is
# another rank's if "passed"
Begun = InFlight | PendingSample | Literal["passed"] | None
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
