"""Drafts of simulated requests, whose tokens say nothing about how often drafts are right."""

from __future__ import annotations

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence

WRONG = 2**31 - 1  # a token that no simulated request generates
SIXTEEN_BITS = 1 << 16


class AssumedDrafts:
    """Proposes tokens of which a given share is right.

    A simulated request generates one token again and again, so its last one is known to be the next. Which
    drafts are right depends on the request and the position alone.

    Args:
        right: share of drafts that are right, given that all before them are.
        most: see Drafter.
    """

    def __init__(self, right: float, most: int) -> None:
        self._right, self.most = right * SIXTEEN_BITS, most

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        at, number = len(sequence.tokens), sequence.number
        if at == sequence.prompt_len:
            return None
        token = sequence.tokens[-1]
        return Draft(
            [
                token if hash((number, position)) % SIXTEEN_BITS < self._right else WRONG
                for position in range(at, at + most)
            ],
            source="assumed",
        )

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
