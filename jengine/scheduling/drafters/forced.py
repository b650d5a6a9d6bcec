"""Drafts from grammars: tokens between two choices, such as the names in a JSON object."""

from __future__ import annotations

from jengine.scheduling.drafters.drafter import Draft
from jengine.scheduling.requests.sequence import Sequence


class Forced:
    """Proposes the tokens that a request's mask expects. Wrong where the model spells the same text in other
    tokens.

    Args:
        most: see Drafter.
    """

    def __init__(self, most: int) -> None:
        self.most = most

    def draft(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter."""
        mask = sequence.request.mask
        tokens = [] if mask is None else mask.forced()[:most]
        return Draft(tokens, source="grammar") if tokens else None

    def forget(self, sequence: Sequence) -> None:
        """See Drafter."""
