"""How often drafts are right, learned from what follows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jengine.scheduling.drafters.choice import TEXT, BestDraft, Rates
from jengine.scheduling.drafters.drafter import Draft


class Request(SimpleNamespace):
    """A sequence without more than tokens."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Fixed:
    """Proposes what it is told."""

    max_drafts = 4

    def __init__(self) -> None:
        self.next: Draft | None = None
        self.asked = 0

    def draft(self, sequence: Any, most: int) -> Draft | None:
        self.asked += 1
        return self.next

    def forget(self, sequence: Any) -> None:
        self.next = None


def test_longer_agreements_are_likelier() -> None:
    rates = Rates()
    chances = [rates.chances(Draft([1], agreed, "ngram"))[0] for agreed in (1, 2, 4, 8, 16, 400)]
    assert chances == [TEXT[1], *TEXT[2:], TEXT[-1]] and chances == sorted(chances)
    assert rates.chances(Draft([1, 2, 3], 3, "ngram")) == pytest.approx([0.5, 0.5 * 0.65, 0.5 * 0.65**2])
    assert rates.chances(Draft([1, 2, 3], 0, "grammar")) == pytest.approx([0.9, 0.9**2, 0.9**3])


def test_shares_follow_what_comes() -> None:
    rates = Rates()
    for _ in range(400):
        rates.note("ngram", 5, False)
        rates.note("ngram", 20, True)
    few, many = rates.chances(Draft([1], 5, "ngram"))[0], rates.chances(Draft([1], 20, "ngram"))[0]
    assert few < 0.05 and many > 0.99
    assert rates.chances(Draft([1], 5, "other"))[0] == TEXT[3], "sources differ"
    for _ in range(400):
        rates.note("ngram", 5, True)
    assert rates.chances(Draft([1], 5, "ngram"))[0] > 0.9, "old tokens fade"


def test_drafts_are_compared_whether_or_not_they_were_verified() -> None:
    drafter, sequence = Fixed(), Request(tokens=[1, 2])
    watched: Any = BestDraft([drafter])
    noted: list[tuple[str, int, bool]] = []
    watched.rates.note = lambda *what: noted.append(what)
    drafter.next = Draft([3, 4, 5, 6], 2, "ngram")
    assert watched.draft(sequence) is drafter.next and watched.draft(sequence) is drafter.next
    assert drafter.asked == 1 and not noted, "nothing has come since"
    sequence.tokens += [3, 9]
    drafter.next = None
    assert watched.draft(sequence) is None and watched.draft(sequence) is None and drafter.asked == 2
    assert noted == [("ngram", 2, True), ("ngram", 3, False)]
    drafter.next = Draft([7, 7, 7, 7], 0, "other")
    sequence.tokens.append(7)
    assert watched.draft(sequence) is drafter.next
    sequence.tokens += [7, 7, 7, 7, 7]
    drafter.next = Draft([1])
    assert watched.draft(sequence) == Draft([1])
    assert noted[2:] == [("other", 0, True)] * 4
    watched.forget(sequence)
    assert not watched._last


def test_the_draft_of_which_most_tokens_should_be_right_is_taken_and_all_are_compared() -> None:
    short, long, sequence = Fixed(), Fixed(), Request(tokens=[1])
    watched: Any = BestDraft([short, long])
    short.next, long.next = Draft([3, 4], 20, "suffix"), Draft([3, 4, 5, 6], 20, "ngram")
    assert watched.draft(sequence) is long.next
    for _ in range(100):
        short.next, long.next = Draft([3, 4], 20, "suffix"), Draft([7, 8, 5, 6], 20, "ngram")
        watched.draft(sequence)
        sequence.tokens += [3, 4]
    assert watched.draft(sequence) is short.next
    right, wrong = (watched.rates.chances(Draft([1], 20, source))[0] for source in ("suffix", "ngram"))
    assert right > 0.95 and wrong < 0.1
    short.next = None
    sequence.tokens.append(1)
    assert watched.draft(sequence) is long.next
    watched.forget(sequence)
    assert short.next is long.next is None
