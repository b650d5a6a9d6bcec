"""Budgets for thinking: after so many tokens between <think> and </think>, the end is forced.

A budget is a token mask, so drafts, grammars and other masks respect it as they do each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jengine.base.errors import InvalidArgument, JengineError
from jengine.core.request import SamplingParams, TokenMask
from jengine.table.program_table import MOST_DRAFTS
from jengine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

START, END = "<think>", "</think>"
KEPT = len(END) - 1  # characters of the output in which a tag may have begun
LOOKED_AT = 16  # tokens at a prompt's end, which have the tag and whitespace


class _State(NamedTuple):
    """After some tokens of the output.

    Attributes:
        thinks: whether the thought has begun and not ended.
        used: its tokens.
        tail: the end of the text.
    """

    thinks: bool
    used: int = 0
    tail: str = ""


class ThinkingBudget(TokenMask):
    """Ends each thought after `budget` tokens. `thinks`: whether the output begins within one."""

    def __init__(self, budget: int, tokenizer: Tokenizer, thinks: bool) -> None:
        self._budget, self._tokenizer = budget, tokenizer
        self._end = tokenizer.encode(END, add_special_tokens=False)
        self._states = [_State(thinks)]  # as many as tokens may be taken back, and the last

    def fill(self, words: np.ndarray) -> None:
        if not (due := self.forced()):
            return
        word, bit = due[0] // 32, words.dtype.type(1 << due[0] % 32)
        allowed = words[word] & bit
        if not allowed:
            raise JengineError("thinking_token_budget: other constraints do not allow the thought to end")
        words[:] = 0
        words[word] = allowed

    def accept(self, token: int) -> None:
        self._states = [*self._states[-MOST_DRAFTS:], self._after(self._states[-1], token)]

    def rollback(self, count: int) -> None:
        self._states = self._states[: len(self._states) - count]

    def forced(self) -> list[int]:
        thinks, used, _ = self._states[-1]
        return self._end[used - self._budget :] if thinks and used >= self._budget else []

    def free(self) -> int:
        return max(self._budget - self._states[-1].used, 0)

    def _after(self, state: _State, token: int) -> _State:
        text = state.tail + self._tokenizer.token_text(token)
        _, tag, rest = text.rpartition(END if state.thinks else START)
        if tag:
            return _State(not state.thinks, tail=rest[-KEPT:])
        return state._replace(used=state.used + state.thinks, tail=text[-KEPT:])


def can_bound(tokenizer: Tokenizer) -> bool:
    """Whether the model's thoughts, if it has any, end with the tag."""
    return any(END in template.source for template in tokenizer.chat_templates.values())


def check_thinking(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raises InvalidArgument if the parameters have a budget that cannot be kept."""
    if (budget := params.thinking_token_budget) is not None and not can_bound(tokenizer):
        limit = f"needs a model that thinks between {START} and {END}; this one's chat template has no {END}"
        raise InvalidArgument("thinking_token_budget", budget, limit)


def bound_thinking(
    masks: Sequence[TokenMask | None], params: SamplingParams, tokenizer: Tokenizer, prompt: Sequence[int]
) -> Sequence[TokenMask | None]:
    """Adds the parameters' budget to the masks of a prompt's samples. `prompt`: its token ids."""
    if params.thinking_token_budget is None:
        return masks
    from jengine.text.masks import AllOf  # imported here, since it imports llguidance

    end = tokenizer.decode(prompt[-LOOKED_AT:], skip_special_tokens=False).rstrip()
    out: list[TokenMask | None] = []
    for mask in masks:
        budget = ThinkingBudget(params.thinking_token_budget, tokenizer, end.endswith(START))
        out.append(budget if mask is None else AllOf([mask, budget]))
    return out
