"""Masks that were advanced along drafts and taken back are as before."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from jengine.core.request import TokenMask
from jengine.core.structured_outputs import StructuredOutputs
from jengine.text.masks import AllOf, AllowedTokens, BadWords, Grammar
from jengine.text.thinking import ThinkingBudget
from jengine.text.tokenizer import Tokenizer
from tests.text.test_masks import allowed, tokenizer

__all__ = ["tokenizer"]
VOCAB, MOST = 3072, 15


def filled(mask: TokenMask) -> list[int]:
    return sorted(allowed(mask, VOCAB))


MASKS: dict[str, Callable[[Tokenizer], TokenMask]] = {
    "regex": lambda tokenizer: Grammar(StructuredOutputs(regex="[ab]{1,6}c?"), tokenizer),
    "json": lambda tokenizer: Grammar(StructuredOutputs(json={"type": "array", "maxItems": 3}), tokenizer),
    "bad words": lambda _: BadWords([[1, 2, 3], [2], [4, 5]]),
    "budget": lambda tokenizer: ThinkingBudget(4, tokenizer, thinks=True),
    "all": lambda tokenizer: AllOf(
        [
            BadWords([[70, 71], [72]]),
            AllowedTokens(range(60, 400)),
            Grammar(StructuredOutputs(regex="[a-z ]*"), tokenizer),
        ]
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_rollback(name: str, tokenizer: Tokenizer) -> None:
    """Also past the end of a grammar. The last token is not read yet."""
    draw = random.Random(0)
    for _ in range(12):
        mask, plain = MASKS[name](tokenizer), MASKS[name](tokenizer)
        for _ in range(12):
            mask.forced()  # asks for them
            choices = filled(plain)
            assert choices == filled(mask)
            taken = 0
            for _ in range(draw.randint(0, MOST)):
                if not (drafts := filled(mask)):
                    break
                mask.accept(draw.choice(drafts))  # a draft
                taken += 1
            mask.rollback(taken)
            if not choices:
                break
            token = draw.choice(choices)
            mask.accept(token)
            plain.accept(token)


def test_forced_tokens(tokenizer: Tokenizer) -> None:
    """Known after the first mask; they go on as long as they are right."""
    mask = Grammar(StructuredOutputs(choice=("hello world this", "hello world that")), tokenizer)
    assert mask.forced() == [], "nothing is computed here"
    filled(mask)
    way = mask.forced()
    assert tokenizer.decode(way).startswith("hello") and len(way) > 2
    mask.accept(way[0])
    assert mask.forced() == way[1:]
    filled(mask)
    mask.accept(way[1])
    mask.accept(way[2])
    assert mask.forced() == way[3:]
    mask.rollback(2)
    assert mask.forced() == way[1:], "a draft changes nothing"
    mask.accept(tokenizer.encode("he", add_special_tokens=False)[0])
    assert mask.forced() == [], "another way"
