"""Compares drafts with what follows, whether or not rows verify them."""

from __future__ import annotations

from typing import NamedTuple

from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.drafters.rates import Rates
from jengine.scheduling.requests.sequence import Sequence


class Watched:
    """Asks a drafter, and learns how often it is right. Drafts of a draft model are made only where they are
    verified.

    Attributes:
        most: see Drafter.
        rates: how often drafts are right.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.most, self.rates = drafter, drafter.most, Rates()
        self._last: dict[Sequence, _Last] = {}

    def draft(self, sequence: Sequence) -> Draft | None:
        """See Drafter. The answer is the same until new tokens are known."""
        length, last = len(sequence.tokens), self._last.get(sequence)
        if last is None or last.length != length:
            if last is not None and last.draft is not None and not last.draft.proposed:
                self._compare(last.draft, sequence.tokens[last.length : last.length + self.most])
            self._last[sequence] = last = _Last(self._drafter.draft(sequence, self.most), length)
        return last.draft

    def verified(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Rows have verified so many of a sequence's drafts, before its new tokens are known."""
        last = self._last.get(sequence)
        if last is not None and last.draft is not None and last.draft.proposed:
            for count in range(min(accepted + 1, drafts)):
                self.rates.note(last.draft.source, 0, count < accepted)

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._last.pop(sequence, None)
        self._drafter.forget(sequence)

    def _compare(self, draft: Draft, came: list[int]) -> None:
        for place, (token, drafted) in enumerate(zip(came, draft.tokens, strict=False)):
            self.rates.note(draft.source, draft.agreed and draft.agreed + place, token == drafted)
            if token != drafted:
                break


class _Last(NamedTuple):
    """
    Attributes:
        draft: None: there was none.
        length: number of the sequence's known tokens before it.
    """

    draft: Draft | None
    length: int
