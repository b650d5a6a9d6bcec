"""Drafts from the request itself: what followed the same tokens before, in its prompt or its output."""

from __future__ import annotations

from dataclasses import dataclass, field

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence

PLACES = 8  # of an n-gram that are compared, the latest ones


class Ngrams:
    """Looks for an earlier occurrence of a sequence's last tokens: the longest, and among equally long ones
    the latest. Proposes what followed there; if that reaches the sequence's end, it goes on with itself.

    Args:
        shortest, longest: number of tokens that must be equal, and that are compared at most.
        most: see Drafter.
    """

    def __init__(self, shortest: int, longest: int, most: int) -> None:
        self._shortest, self._longest, self.most = shortest, longest, most
        self._known: dict[Sequence, _Places] = {}

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        tokens, shortest = sequence.tokens, self._shortest
        known = self._known.get(sequence)
        if known is None:
            known = self._known[sequence] = _Places()
        # an n-gram is entered once a token follows it
        for end in range(max(known.entered + 1, shortest), len(tokens)):
            places = known.by_ngram.setdefault(tuple(tokens[end - shortest : end]), [])
            places.append(end)
            del places[:-PLACES]
        known.entered = max(known.entered, len(tokens) - 1)
        best = length = 0
        for end in reversed(known.by_ngram.get(tuple(tokens[-shortest:]), ())):
            same = shortest
            while same < min(self._longest, end) and tokens[end - same - 1] == tokens[-same - 1]:
                same += 1
            if same > length:
                best, length = end, same
        if not length:
            return None
        drafts = tokens[best : best + most]
        while len(drafts) < most:
            drafts.append(drafts[len(drafts) - (len(tokens) - best)])
        return Draft(drafts, length, "ngram")

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._known.pop(sequence, None)


@dataclass(slots=True)
class _Places:
    """Where each n-gram of a sequence ends, in order.

    Attributes:
        entered: number of the sequence's tokens before which all n-grams end.
    """

    by_ngram: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    entered: int = 0
