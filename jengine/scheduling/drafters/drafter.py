"""What proposes drafts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jengine.scheduling.requests.sequence import Sequence


class Draft(NamedTuple):
    """Tokens that may follow a sequence's known tokens.

    Attributes:
        tokens: at least one. -2, -3 and so on stand for those that a draft model proposes on the device.
        agreed: number of tokens before the first one that the sequence has in common with the draft's source;
            0: unknown, or the source is no text. More of them make a draft likelier.
        source: name of the drafter that proposes it.
    """

    tokens: list[int]
    agreed: int = 0
    source: str = ""

    @property
    def proposed(self) -> bool:
        """Whether a draft model proposes the tokens on the device."""
        return self.tokens[0] < 0


class Drafter(Protocol):
    """Proposes the next tokens of running sequences. Wrong proposals cost time, but change no output.

    Attributes:
        max_drafts: maximum number of tokens that it proposes for a sequence in a step.
    """

    max_drafts: int

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        """At most `limit` tokens that may follow the sequence's known tokens; None is a normal answer."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives back its slot and its pages, and may come back later."""
