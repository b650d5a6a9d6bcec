"""Budgets for thinking: how long thoughts are, whatever the model writes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jengine.core.request import SamplingParams, TokenMask
from jengine.text.masks import AllowedTokens
from jengine.text.thinking import END, START, ThinkingBudget, bound_thinking
from jengine.text.tokenizer import Tokenizer
from tests.text.test_masks import allowed, tokenizer

__all__ = ["tokenizer"]


def walk(mask: TokenMask, tokenizer: Tokenizer, draw: random.Random, count: int) -> list[int]:
    """So many random tokens that the mask allows; often parts of tags."""
    parts = [*tokenizer.encode(START, False), *tokenizer.encode(END, False)]
    likely = [[draw.randrange(300)], parts[:1], *[tokenizer.encode(tag, False) for tag in (START, END)]]
    tokens: list[int] = []
    coming: list[int] = []
    for _ in range(count):
        coming = coming or [*draw.choice(likely)]
        choices, wanted = allowed(mask, tokenizer.vocab_size), coming.pop(0)
        free, due = mask.free(), mask.forced()
        assert choices == ({due[0]} if due else set(range(tokenizer.vocab_size))) and not (free and due)
        if wanted not in choices:
            wanted, coming = due[0], []
        mask.accept(wanted)
        tokens.append(wanted)
    return tokens


@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_no_thought_is_longer(budget: int, tokenizer: Tokenizer) -> None:
    """It has as many tokens as the budget, and those of the end."""
    most, forced = budget + len(tokenizer.encode(END, False)), 0
    for seed in range(20):
        draw = random.Random(seed)
        thinks, used, text = bool(seed % 2), 0, ""
        for token in walk(ThinkingBudget(budget, tokenizer, thinks), tokenizer, draw, 150):
            text += tokenizer.token_text(token)
            used += thinks
            assert used <= most
            if (tag := END if thinks else START) in text:
                forced += thinks and used == most
                thinks, used, text = not thinks, 0, text.rpartition(tag)[2]
    assert forced, "some thoughts were cut"


def test_where_a_thought_begins(tokenizer: Tokenizer) -> None:
    """At the prompt's end, or in the output; not earlier in the prompt."""
    params, size = SamplingParams(thinking_token_budget=0), tokenizer.vocab_size
    begin, end = tokenizer.encode(START, False), tokenizer.encode(END, False)
    for prompt, thinks in (("a<think>\n", True), ("a<think>b", False), ("<think>a</think>", False)):
        [mask] = bound_thinking([None], params, tokenizer, tokenizer.encode(prompt))
        assert mask is not None and mask.forced() == (end if thinks else [])
        if not thinks:
            for token in begin:
                assert len(allowed(mask, size)) == size
                mask.accept(token)
        assert allowed(mask, size) == {end[0]} and mask.free() == 0


def test_constraints_that_do_not_allow_the_end(tokenizer: Tokenizer) -> None:
    params, prompt = SamplingParams(thinking_token_budget=0), tokenizer.encode("<think>")
    first, second = bound_thinking([AllowedTokens([70]), None], params, tokenizer, prompt)
    assert first is not None and second is not None and first.free() == 0
    with pytest.raises(Exception, match="thinking_token_budget: other constraints do not allow"):
        first.fill(np.full(-(-tokenizer.vocab_size // 32), 0xFFFFFFFF, np.uint32))
    second.fill(np.full(-(-tokenizer.vocab_size // 32), 0xFFFFFFFF, np.uint32))
