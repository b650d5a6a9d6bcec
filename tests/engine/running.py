"""Helpers that run requests through an engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import pairwise

import jax
import numpy as np

from benchmarks.restart import restart_scheduler
from jengine.core.request import Request, SamplingParams, TokenMask
from jengine.core.updates import PromptScores, TokenUpdate
from jengine.engine.loop.engine import Engine
from jengine.execution.runner import Runner
from jengine.scheduling.costs.step_costs import StepCosts
from jengine.scheduling.requests.sequence import Sequence
from jengine.text.masks import AllOf, AllowedTokens

SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 136,
    "tile_size": 64,
    "page_size": 16,
    "num_pages": 120,
    "warm_up": "all",
}


class Estimates(StepCosts):
    """Unmeasured costs, so that tests of plans do not depend on this machine's load."""

    def observe(self, *_: object) -> None:
        pass

    observe_burst = observe


# a prompt, and its cache salt
Work = tuple[list[int], SamplingParams] | tuple[list[int], SamplingParams, str | None]


def limit_pages(engine: Engine, num_pages: int, num_states: int | None = None) -> None:
    """Let an idle engine use fewer pages than its cache has, and fewer states: it preempts, with programs
    that are compiled already.

    Its cache is empty.
    """
    scheduler, runner = engine.scheduler, engine.runner
    if scheduler.blocks.tier is not None:
        assert isinstance(runner, Runner)
        jax.block_until_ready(runner.moving)
        runner.swapped()  # what the old tier had under way
    states = scheduler.blocks.states
    changes = {}
    if num_states is not None and states is not None:  # drafts keep theirs
        changes["num_states"] = num_states + len(states.spare)
    restart_scheduler(engine, num_pages=num_pages, **changes)


@dataclass
class Answer:
    sequence: Sequence
    updates: list[TokenUpdate] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [update.token for update in self.updates]


def run(engine: Engine, work: List[Work], each_step: Callable[[], object] = lambda: None) -> list[Answer]:
    """Runs requests. Returns answers in order, grouped by prompt. Checks that each ended once, and that all
    pages and slots are free."""
    answers = {}
    for i, one in enumerate(work):
        requests = requests_of(str(i), *one)
        engine.limits.validate(requests[0])
        for sequence in engine.add(*requests):
            answers[sequence.request_id] = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            if isinstance(update, PromptScores):
                answers[update.request_id].scores.append(update)
                continue
            assert not any(u.finish_reason for u in answers[update.request_id].updates), (
                "a token after the end"
            )
            answers[update.request_id].updates.append(update)
        engine.scheduler.check_integrity()
        each_step()
    assert engine.scheduler.blocks.owned == 0
    assert all(a.updates[-1].finish_reason for a in answers.values())
    return list(answers.values())


def overlapped_steps(engine: Engine) -> tuple[int, int]:
    """(steps whose successor was dispatched before they were read, steps with a successor)."""
    pairs = list(pairwise(engine.records.steps))
    return sum(after.dispatched < step.ended for step, after in pairs), len(pairs)


def requests_of(
    name: str, prompt: list[int], params: SamplingParams, salt: str | None = None
) -> list[Request]:
    """One request for each of the n samples."""
    return [
        Request(
            request_id=f"{name}.{index}",
            prompt_token_ids=list(prompt),
            params=params,
            sample_index=index,
            mask=mask_of(params),
            cache_salt=salt,
        )
        for index in range(params.n)
    ]


def mask_of(params: SamplingParams) -> TokenMask | None:
    """A mask that needs no tokenizer."""
    if params.allowed_token_ids is not None:
        return AllowedTokens(params.allowed_token_ids)
    return AllOf([]) if params.many_stops else None


def prompts(count: int, *, vocab: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens, of all sizes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(length)).tolist() for length in np.linspace(1, longest, count).round()]
