"""Drafts from the request itself: what followed the same tokens before, in its prompt or its output."""

from __future__ import annotations

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.drafters.places import Places, agreed, continued
from jengine.scheduling.requests.sequence import Sequence


class Ngrams:
    """Looks for an earlier occurrence of a sequence's last tokens: the longest, and among equally long ones
    the latest. Proposes what followed there; if that reaches the sequence's end, it goes on with itself.

    Args:
        shortest, longest: number of tokens that must be equal, and that are compared at most.
        most: see Drafter.
    """

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        self._shortest, self._longest, self.most = shortest, longest, most
        self._known: dict[Sequence, Places] = {}

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        tokens, best, length = sequence.tokens, 0, 0
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = Places(self._shortest)
        for end in known.of_end(tokens):
            if (same := agreed(tokens, end, tokens, self._longest)) > length:
                best, length = end, same
        if not length:
            return None
        return Draft(continued(tokens, best, most), length, "ngram")

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._known.pop(sequence, None)
