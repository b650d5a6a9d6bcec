"""The one loop: schedule -> pack -> run -> collect. Knows tokens, no text."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from jengine.config import ModelConfig
from jengine.errors import InvalidArgument
from jengine.execution.runner import InFlight, StepResult
from jengine.observe.compiles import compile_count
from jengine.observe.trace import StepTrace
from jengine.request import FinishReason, Request
from jengine.scheduling.scheduler import Scheduler
from jengine.scheduling.sequence import Sequence, State
from jengine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """A sequence's next token. Its finish_reason, once set, is final unless a stop string is found in the text."""

    sequence: Sequence
    token: int
    finished: bool
    logprob: float = 0.0
    rank: int = 0
    top: list[tuple[int, float]] = field(default_factory=list)


class Runs(Protocol):
    """What an engine asks of a runner."""

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Start a step; returns before it has run."""

    def read(self, step: InFlight) -> StepResult:
        """Wait for a step's tokens."""


class Engine:
    """Requests, and the loop that works on them.

    Attributes:
        model: its configuration.
        trace: when steps were dispatched and read.

    Args:
        overlap: dispatch a step before the last one's tokens are read.
        seed: from which requests without a seed of their own draw theirs.
    """

    def __init__(self, model: ModelConfig, runner: Runs, scheduler: Scheduler, *, overlap: bool = True, seed: int = 0) -> None:
        self.model, self.runner, self.scheduler, self.overlap = model, runner, scheduler, overlap
        self.trace = StepTrace()
        self._seeds = random.Random(seed)
        self._in_flight: deque[tuple[int, InFlight]] = deque()
        self._steps = 0
        self._compiles_at_start = compile_count()

    @property
    def compiles_since_start(self) -> int:
        """XLA compilations in this process since warm-up; each is a bug, here or in what else the process runs."""
        return compile_count() - self._compiles_at_start

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return self.scheduler.has_work or bool(self._in_flight)

    def check(self, request: Request) -> None:
        """Raises InvalidArgument for token ids outside the vocabulary; `add` checks the rest."""
        vocab = self.model.vocab_size
        limit = f"ids must be in [0, {vocab})"
        ids = request.prompt_token_ids
        if any(type(token) is not int for token in ids):
            raise InvalidArgument("prompt_token_ids", ids, "ids must be whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise InvalidArgument("prompt_token_ids", next(t for t in ids if not 0 <= t < vocab), limit)
        for token in request.params.stop_token_ids:
            if token >= vocab:
                raise InvalidArgument("stop_token_ids", token, limit)
        self.scheduler.check(request, self.model.eos_token_ids)

    def add(self, request: Request) -> Sequence:
        """Queue a request.

        Raises:
            InvalidArgument: it can never be answered; says why. Nothing has been queued then.
        """
        self.check(request)
        seed = request.params.seed
        return self.scheduler.add(
            request,
            seed=self._seeds.getrandbits(64) if seed is None else seed,
            eos_token_ids=self.model.eos_token_ids,
        )

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End a sequence for a reason that only the text shows."""
        self.scheduler.finish(sequence, reason, stop_reason)

    def abort(self, request_id: str) -> Sequence | None:
        """End a request early; None where there is none, or it has ended."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenUpdate]:
        """Dispatch the next step, then read the one before it. Returns the tokens that were read."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._in_flight.append((self._steps, self.runner.dispatch(plan)))
            self.trace.add("dispatch", self._steps, f"{plan.trunk} {plan.sampler}")
            self._steps += 1
        wait_for = 1 if self.overlap and plan is not None else 0
        updates: list[TokenUpdate] = []
        while len(self._in_flight) > wait_for:
            number, step = self._in_flight.popleft()
            result = self.runner.read(step)
            self.trace.add("read", number)
            updates += self._collect(step, result)
        return updates

    def _collect(self, step: InFlight, result: StepResult) -> list[TokenUpdate]:
        collected = self.scheduler.collect(step.plan, result.tokens)
        if result.logprobs is None:
            return [TokenUpdate(sequence, token, sequence.state is State.FINISHED) for sequence, token in collected]
        rows = {sequence: row for row, sequence in step.plan.sampled}
        got = result.logprobs
        updates = []
        for sequence, token in collected:
            row, count = rows[sequence], sequence.request.params.logprobs or 0
            top = list(zip(got.top_ids[row, :count].tolist(), got.top_logprobs[row, :count].tolist(), strict=True))
            finished = sequence.state is State.FINISHED
            updates.append(TokenUpdate(sequence, token, finished, float(got.logprobs[row]), int(got.ranks[row]), top))
        return updates
