"""How many drafts a step verifies: as many as give most expected tokens a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Drafts must promise so many times the tokens a second of a step without them. Costs and chances are
# estimates, and what looks best among estimates is on average worse than it looks.
WORTH = 1.03


class Bucket(NamedTuple):
    """A program that has rows for drafts.

    Attributes:
        drafts: number of rows that the step leaves for them.
        seconds: predicted seconds of the step with this program, without the drafts' contexts.
    """

    drafts: int
    seconds: float


class Offer(NamedTuple):
    """Drafts that a step could verify.

    Attributes:
        tokens: number of tokens that the step yields without drafts.
        seconds: that it takes without drafts.
        chances: for each draft, the probability that it becomes output; the likeliest first.
        contexts: seconds that each draft's row needs to read its context.
        buckets: programs, the smallest first.
        limit: seconds within which the step should end, because a request's next token is due.
    """

    tokens: int
    seconds: float
    chances: Sequence[float]
    contexts: Sequence[float]
    buckets: Sequence[Bucket]
    limit: float = math.inf


HowMany = Callable[[Offer], int]


def most_a_second(offer: Offer) -> int:
    """How many drafts, the likeliest first, give most expected tokens a second; 0: drafts do not pay, or
    hardly.
    """
    best, best_rate = 0, WORTH * offer.tokens / offer.seconds
    expected, contexts, at = float(offer.tokens), 0.0, 0
    for drafts, seconds in offer.buckets:
        while at < min(drafts, len(offer.chances)):
            expected += offer.chances[at]
            contexts += offer.contexts[at]
            at += 1
            taken = seconds + contexts
            if expected > best_rate * taken and taken <= offer.limit:
                best, best_rate = at, expected / taken
    return best


def gain(offer: Offer, count: int) -> float:
    """Expected tokens a second with this many drafts, relative to none."""
    if not count:
        return 1.0
    seconds = next(bucket.seconds for bucket in offer.buckets if bucket.drafts >= count)
    expected = offer.tokens + sum(offer.chances[:count])
    return expected * offer.seconds / (offer.tokens * (seconds + sum(offer.contexts[:count])))


def all_of_them(offer: Offer) -> int:
    """Every draft that has a row."""
    return min(len(offer.chances), max([bucket.drafts for bucket in offer.buckets], default=0))


def could_pay(offer: Offer) -> bool:
    """Whether drafts would pay if all of them were right, and read nothing."""
    return any(
        bucket.drafts
        and bucket.seconds <= offer.limit
        and (offer.tokens + bucket.drafts) * offer.seconds > WORTH * offer.tokens * bucket.seconds
        for bucket in offer.buckets
    )
