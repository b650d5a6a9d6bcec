"""What proposes drafts."""

from __future__ import annotations

from typing import Protocol

from jengine.scheduling.requests.sequence import Sequence


class Drafter(Protocol):
    """Proposes the next tokens of running sequences. Wrong proposals cost time, but change no output.

    Attributes:
        most: maximum number of tokens that it proposes for a sequence in a step.
    """

    most: int

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` tokens that may follow the sequence's known tokens; none is a normal answer."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives back its slot and its pages, and may come back later."""
