"""Compares drafts with what follows, whether or not rows verify them."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.drafters.rates import Rates
from jengine.scheduling.requests.sequence import Sequence


class Watched:
    """Asks several drafters, takes the draft of which most tokens should be right, and learns how often each
    drafter is right. Drafts of a draft model are made only where they are verified.

    Args:
        drafters: at least one. The first counts among equals.

    Attributes:
        most: maximum number of tokens that they propose for a sequence in a step.
        rates: how often drafts are right.
    """

    def __init__(self, drafters: List[Drafter]) -> None:
        self._drafters, self.rates = drafters, Rates()
        self.most = max(drafter.most for drafter in drafters)
        self._last: dict[Sequence, _Last] = {}

    def draft(self, sequence: Sequence) -> Draft | None:
        """See Drafter. The answer is the same until new tokens are known."""
        length, last = len(sequence.tokens), self._last.get(sequence)
        if last is None or last.length != length:
            if last is not None:
                self._compare(last, sequence.tokens[last.length : last.length + self.most])
            found = [drafter.draft(sequence, drafter.most) for drafter in self._drafters]
            drafts = [draft for draft in found if draft is not None]
            self._last[sequence] = last = _Last(max(drafts, key=self._expected, default=None), drafts, length)
        return last.best

    def verified(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Rows have verified so many of a sequence's drafts, before its new tokens are known."""
        last = self._last.get(sequence)
        if last is not None and last.best is not None and last.best.proposed:
            for count in range(min(accepted + 1, drafts)):
                self.rates.note(last.best.source, 0, count < accepted)

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._last.pop(sequence, None)
        for drafter in self._drafters:
            drafter.forget(sequence)

    def _expected(self, draft: Draft) -> float:
        """The number of its tokens that should be right."""
        return sum(self.rates.chances(draft))

    def _compare(self, last: _Last, came: list[int]) -> None:
        for draft in last.drafts:
            if draft.proposed:
                continue
            for place, (token, drafted) in enumerate(zip(came, draft.tokens, strict=False)):
                self.rates.note(draft.source, draft.agreed and draft.agreed + place, token == drafted)
                if token != drafted:
                    break


class _Last(NamedTuple):
    """
    Attributes:
        best: the one of the drafts that was taken; None: there were none.
        drafts: one of each drafter that had one.
        length: number of the sequence's known tokens before them.
    """

    best: Draft | None
    drafts: list[Draft]
    length: int
