"""Which decoding sequences get a row in a step, if several steps run at once in the stages of a pipeline."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as List

from jengine.scheduling.prompts.prefix_lookup import PendingTiles
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step.plan_builder import PlanBuilder

SPREAD = 2  # rounds of the stages over which pending tiles are spread beside rows; more gains little


class Cohorts:
    """As many steps run at once as there are stages. A row reads the token that its sequence got in an
    earlier step. So a sequence gets a row only if its last token is known, or comes from so early a step that
    this one need not wait for it. If there is nothing else to run, the step waits for the oldest one in
    flight. Those that got a token together, a cohort, thus get the next one together, in every
    n-th step of n.

    A step has at most an n-th of all decoding sequences, those whose last step is the longest ago. So
    cohorts remain equal when sequences come and end, and none waits for ever.

    Several ranks step together, so they count the same steps, with or without a part in each.

    Args:
        through_host: whether tokens of earlier steps come from the host, so that a row waits until it has
            read them. There is then one cohort more than stages, whose tokens are on their way.

    Attributes:
        count: number of cohorts.
        waits: whether a step waits for the oldest one in flight if there is nothing else to run. Of several
            ranks, only if none has anything else.
    """

    def __init__(self, stages: int, through_host: bool = False) -> None:
        self.stages, self.through_host = stages, through_host and stages > 1
        self.count = stages + self.through_host
        self.waits = not self.through_host
        self._planned = self._collected = 0  # number, from 1, of the last step
        self._flying = deque[int]()  # numbers of the steps between, without those of other ranks alone
        self._last: dict[Sequence, int] = {}  # number of the step in which it had a row or a sample

    def forget(self, sequence: Sequence) -> None:
        self._last.pop(sequence, None)

    def take(self, decoding: list[Sequence], *, prompts: bool) -> list[Sequence]:
        """The decoding sequences that get a row now, in the same order.

        Args:
            prompts: whether there are prompts to compute.
        """
        last, ready = self._last, self.ready(decoding)
        if self.waits and not (ready or prompts):
            ready = [sequence for sequence in decoding if last.get(sequence, 0) <= self.oldest]
        share = -(-len(decoding) // self.count)
        if len(ready) <= share:
            return ready
        chosen = {*sorted(ready, key=lambda sequence: last.get(sequence, 0))[:share]}
        return [sequence for sequence in ready if sequence in chosen]

    def ready(self, decoding: list[Sequence]) -> list[Sequence]:
        """The sequences whose step need not wait for another one."""
        last, until = self._last, self._collected
        if not self.through_host:
            until = max(until, self._planned + 1 - self.stages)
        return [sequence for sequence in decoding if last.get(sequence, 0) <= until]

    def planned(self, plan: PlanBuilder) -> int:
        """A step is planned. Returns how many of the last ones in flight it does not wait for."""
        self._planned += 1
        overtaken = 0
        if self.stages > 1:
            needed = max([self._last.get(sequence, 0) for sequence in plan.rows], default=0)
            overtaken = sum([number > needed for number in self._flying])
            for sequence in (*plan.rows, *plan.sampled):
                self._last[sequence] = self._planned
        self._flying.append(self._planned)
        return overtaken

    def passed(self) -> None:
        """Other ranks have planned a step, this one has no part in it."""
        self._planned += 1

    def collected(self) -> None:
        """The oldest step in flight has been read."""
        self._collected = self._flying.popleft()

    @property
    def oldest(self) -> float:
        """Number of the oldest step in flight, without those of other ranks alone; inf: there is none."""
        return self._flying[0] if self._flying else math.inf

    def recent(self, steps: int) -> int:
        """How many of the last `steps` steps are in flight, without those of other ranks alone."""
        return sum([number > self._planned - steps for number in self._flying])

    def share(self, tiles: int, pending: PendingTiles, buckets: List[int], *, rows: int) -> int:
        """How many of these pending tiles a step computes, of `tiles` that it may: an n-th of all, beside
        rows less, rounded up to a bucket. So a prompt's chunks follow each other through the stages, and
        steps are of similar size: a stage waits if the step before was shorter.
        """
        if self.stages == 1:
            return tiles
        steps = self.stages * (SPREAD if rows else 1)
        share = max(-(-pending.count // steps), pending.least)
        return min(tiles, next((bucket for bucket in buckets if bucket >= share), share))

    def check_integrity(self) -> None:
        """Raises AssertionError if steps in flight are not between those collected and planned."""
        numbers = [self._collected, *self._flying]
        assert numbers == sorted({*numbers}) and numbers[-1] <= self._planned, "a step was collected twice"
