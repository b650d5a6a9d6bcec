"""Thoughts of models that reason: whether a prompt leaves one open, and constraints after them."""

from __future__ import annotations

import re

from jengine import StructuredOutputs, Tokenizer, after_thought

START, END = "<think>", "</think>"


class Turns:
    """Finds the last turn of a prompt: what follows the last of the tokens that templates write around
    messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        marks = [token for token in added if token.strip() and token not in (START, END)]
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def last(self, prompt: str) -> str:
        if self._marks is None:
            return prompt
        return prompt[max((mark.end() for mark in self._marks.finditer(prompt)), default=0) :]


def open_thought(turn: str) -> bool | None:
    """Whether the last turn of a prompt leaves a thought open; None: it has none."""
    start, end = turn.rfind(START), turn.rfind(END)
    return None if start == end else start > end


def after_reasoning(what: StructuredOutputs, inside: bool) -> StructuredOutputs | None:
    """The same constraint after `</think>`; None for a Lark grammar, which applies from the first token on.

    Args:
        inside: see `after_thought`.
    """
    return None if what.grammar is not None else after_thought(what, inside)
