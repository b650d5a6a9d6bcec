"""What proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from jengine.scheduling.requests.sequence import Sequence

PLACES = 8  # of an n-gram that are known, the latest ones
AT_ONCE = 2048  # tokens that are entered in one call at most; about a millisecond


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

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def draft(self, sequence: Sequence, limit: int) -> Draft | None:
        """At most `limit` tokens that may follow the sequence's known tokens; None is a normal answer."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives back its slot and its pages, and may come back later."""
        return None


class Places:
    """The places of each n-gram of a growing text. One is entered once a token follows it.

    Args:
        length: tokens of an n-gram.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._entered = length - 1  # n-grams that end up to here are entered

    def of_end(self, tokens: List[int]) -> list[int]:
        """Enters new text, at most AT_ONCE tokens. Returns other ends of its last n-gram, latest first."""
        length, first = self._length, self._entered + 1
        last = min(len(tokens), first + AT_ONCE)
        for end in range(first, last):
            places = self._ends.setdefault(tuple(tokens[end - length : end]), [])
            places.append(end)
            del places[:-PLACES]
        self._entered = max(last - 1, self._entered)
        return self._ends.get(tuple(tokens[-length:]), [])[::-1]


def agreed(text: List[int], end: int, tokens: List[int], limit: int) -> int:
    """Number of tokens before `end` that are those at the end of `tokens`; at most `limit`."""
    same, limit = 0, min(limit, end, len(tokens))
    while same < limit and text[end - same - 1] == tokens[-same - 1]:
        same += 1
    return same


def continued(tokens: List[int], start: int, count: int) -> list[int]:
    """`count` tokens from a place in the text. A text that ends before goes on as it did from there."""
    copied = list(tokens[start : start + count])
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return copied
