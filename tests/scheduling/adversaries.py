"""Drafters that are always right, always wrong, or right by chance."""

from __future__ import annotations

import random
from collections.abc import Callable

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence
from tests.scheduling.answers import alone


class Knowing:
    """Drafts from what each sequence would generate alone.

    Args:
        output: of a sequence, all tokens that it will generate.
        right: probability that a token is right.
    """

    def __init__(
        self, output: Callable[[Sequence], list[int]], right: float, most: int = 15, seed: int = 0
    ) -> None:
        self._output, self._right, self.max_drafts, self._draw = output, right, most, random.Random(seed)
        self.asked = 0

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        self.asked += 1
        known = len(sequence.tokens) - sequence.prompt_len
        right = self._output(sequence)[known : known + most]
        drafts = [token if self._draw.random() < self._right else abs(token - 1) for token in right]
        return Draft(drafts, source="knowing") if drafts else None

    def forget(self, sequence: Sequence) -> None:
        pass


def knowing(right: float, max_model_len: int, most: int = 15, seed: int = 0) -> Knowing:
    """For the strict device."""
    answers: dict[Sequence, list[int]] = {}

    def output(sequence: Sequence) -> list[int]:
        if sequence not in answers:
            answers[sequence] = alone(sequence.request, sequence.seed, max_model_len)[0]
        return answers[sequence]

    return Knowing(output, right, most, seed)
