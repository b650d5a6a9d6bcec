"""A loop around a scheduler whose clock stands still between steps: tests add requests and take steps one by
one.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping

from jengine.core.request import Request
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.step_plan import StepPlan

TOKEN, END = 1, 0  # generated tokens; the second one ends a request


class VirtualLoop:
    """The engine's loop around a scheduler, whose clock must be `clock`.

    Args:
        costs: actual durations of steps; the scheduler's own costs may differ.
        ahead: number of steps planned before one's tokens are available, as with overlap.
        lengths: by request id, the number of tokens at which a request stops.

    Attributes:
        now: seconds.
        steps: number of steps, and `busy`: their total seconds.
        sequences: in order of arrival, including ended ones, with the times of their first and last token.
    """

    def __init__(self, costs: StepCosts, ahead: int = 1, lengths: Mapping[str, int] | None = None) -> None:
        self.now = self.busy = self._free_at = 0.0
        self.costs, self.ahead, self.lengths, self.steps = costs, ahead, lengths or {}, 0
        self.sequences: list[Sequence] = []
        self.ended: dict[Sequence, float] = {}
        self._flying: deque[tuple[float, StepPlan]] = deque()

    def clock(self) -> float:
        return self.now

    def add(self, scheduler: Scheduler, request: Request) -> Sequence:
        sequence = scheduler.add(request, seed=0, eos_token_ids=(END,))
        self.sequences.append(sequence)
        return sequence

    def run(self, scheduler: Scheduler, requests: Iterable[Request]) -> None:
        """Runs all requests, each from its arrival, until they have ended."""
        coming = [(request.arrival, i, request) for i, request in enumerate(requests)]
        heapq.heapify(coming)
        while coming or scheduler.has_work or self._flying:
            while coming and coming[0][0] <= self.now:
                self.add(scheduler, heapq.heappop(coming)[2])
            if not self.step(scheduler):
                self.now = min(coming[0][0] if coming else scheduler.wakes_at, scheduler.wakes_at)

    def step(self, scheduler: Scheduler) -> bool:
        """Plans a step, then waits for the one `ahead` of it. Returns False if nothing runs."""
        plan = scheduler.schedule() if scheduler.has_work else None
        self.note_rejected(scheduler)
        if plan is not None:
            seconds = self.costs.seconds(plan.trunk, plan.sampler, plan.work)
            self._free_at = max(self._free_at, self.now) + seconds
            self._flying.append((self._free_at, plan))
            self.steps, self.busy = self.steps + 1, self.busy + seconds
        elif not self._flying:
            return False
        while len(self._flying) > (self.ahead if plan is not None else 0):
            self.now, done = self._flying.popleft()
            for _, sequence, _ in scheduler.collect(
                done, [[self._token(scheduler.registry.by_number.get(s.seq))] for s in done.samples]
            ):
                if sequence.finish_reason is not None:
                    self.ended[sequence] = self.now
        return True

    def _token(self, sequence: Sequence | None) -> int:
        ends = sequence is not None and len(sequence.tokens) - sequence.prompt_len + 1 == self.lengths.get(
            sequence.request_id
        )
        return END if ends else TOKEN

    def note_rejected(self, scheduler: Scheduler) -> None:
        self.ended |= dict.fromkeys(scheduler.acceptance.rejected, self.now)
        scheduler.acceptance.rejected.clear()
