"""Running requests through an engine, in tests."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from jengine.engine import Engine
from jengine.request import Request, SamplingParams, TokenMask
from jengine.scheduling.blocks import BlockManager
from jengine.scheduling.sequence import Sequence
from jengine.text.masks import AllowedTokens
from jengine.updates import PromptScores, TokenUpdate

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 136, "tile_size": 64, "page_size": 16, "num_pages": 120}


def limit_pages(engine: Engine, num_pages: int) -> None:
    """Let an idle engine use fewer pages than its cache has: it preempts, with programs that are compiled already."""
    scheduler = engine.scheduler
    old = scheduler.blocks
    scheduler.blocks = BlockManager(old.page_size, [num_pages], old.groups, prefix_caching=old.prefix_caching)
    scheduler.sequence = dataclasses.replace(scheduler.sequence, pages=num_pages - 1)


@dataclass
class Answer:
    sequence: Sequence
    updates: list[TokenUpdate] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [update.token for update in self.updates]


def run(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    """Answers in order. Checks that each ended once, and that every page and slot came back."""
    answers = {}
    for i, (prompt, params) in enumerate(work):
        request = Request(request_id=str(i), prompt_token_ids=list(prompt), params=params, mask=mask_of(params))
        engine.limits.validate(request)
        [sequence] = engine.add(request)
        answers[sequence.request_id] = Answer(sequence)
    while engine.has_work:
        for update in engine.step():
            if isinstance(update, PromptScores):
                answers[update.request_id].scores.append(update)
                continue
            assert not any(u.finish_reason for u in answers[update.request_id].updates), "a token after the end"
            answers[update.request_id].updates.append(update)
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.owned == 0
    assert all(a.updates[-1].finish_reason for a in answers.values())
    return list(answers.values())


def mask_of(params: SamplingParams) -> TokenMask | None:
    """What needs no tokenizer."""
    return None if params.allowed_token_ids is None else AllowedTokens(params.allowed_token_ids)


def prompts(count: int, *, vocab: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens, of all sizes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, int(length)).tolist() for length in np.linspace(1, longest, count).round()]
