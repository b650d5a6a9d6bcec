"""Drafts of a draft model, which proposes them on the device."""

from __future__ import annotations

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence


class DraftModel:
    """Asks for as many drafts as it may; see `Span.following`.

    Args:
        most: see Drafter.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        return Draft([*range(-2, -2 - most, -1)], source="model")

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
