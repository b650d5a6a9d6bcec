"""Compares drafts with what follows, whether or not rows verify them."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.scheduling.drafters.drafter import Draft, Drafter
from jengine.scheduling.drafters.rates import Rates
from jengine.scheduling.requests.sequence import Sequence


class Watched:
    """Asks a drafter, and learns how often it is right. While a sequence follows its last draft, the rest of
    that is the answer.

    Attributes:
        most: see Drafter.
        rates: how often drafts are right.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.most, self.rates = drafter, drafter.most, Rates()
        self._last: dict[Sequence, _Last] = {}

    def draft(self, sequence: Sequence) -> Draft | None:
        """See Drafter."""
        length, last = len(sequence.tokens), self._last.get(sequence)
        if last is not None and last.length != length:
            last = self._compared(sequence, last)
        if last is None:
            draft = self._drafter.draft(sequence, self.most)
            self._last[sequence] = last = _Last(draft, length)
        return last.draft

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
        self._last.pop(sequence, None)
        self._drafter.forget(sequence)

    def _compared(self, sequence: Sequence, last: _Last) -> _Last | None:
        """What the tokens that have come since leave of a draft; None: too little, or it was wrong."""
        draft = last.draft
        if draft is None:
            return None
        known = sequence.tokens[last.length : last.length + len(draft.tokens)]
        for count, (token, drafted) in enumerate(zip(known, draft.tokens, strict=False)):
            self.rates.note(draft.source, draft.agreed + count, token == drafted)
            if token != drafted:
                return None
        rest = draft.tokens[len(known) :]
        if 2 * len(rest) <= self.most or last.length + len(known) != len(sequence.tokens):
            return None
        last.draft = Draft(rest, draft.agreed + len(known), draft.source)
        last.length = len(sequence.tokens)
        return last


@dataclass(slots=True)
class _Last:
    """
    Attributes:
        draft: None: there was none.
        length: number of the sequence's known tokens before it.
    """

    draft: Draft | None
    length: int
