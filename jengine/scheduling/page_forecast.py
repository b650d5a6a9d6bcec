"""How many pages running sequences will hold at the most, from what they are expected to generate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Growth(NamedTuple):
    """A sequence's tokens now, and how many more are expected until it ends and frees its pages."""

    tokens: int
    rest: int


def peak_pages(sequences: Iterable[Growth], page_size: int, most: Sequence[int | None] = (None,)) -> int:
    """An upper bound of the pages that they hold together, if each gets a token a step and ends when it has as many as are expected.

    They hold the most just before one of them ends: then those that go on have grown by as much as it had left. So it is enough to
    look at these moments (as the Past-Future scheduler does, Gong et al., 2025).

    Args:
        most: for each cache group, the pages that a sequence holds of it at most; None: as many as its tokens need.
    """
    tokens = peak = 0
    for count, growth in enumerate(sorted(sequences, key=lambda growth: -growth.rest), 1):
        tokens += growth.tokens
        pages = -(-(tokens + count * (growth.rest + page_size - 1)) // page_size)  # the last page of each may be nearly empty
        peak = max(peak, sum([pages if limit is None else min(pages, count * limit) for limit in most]))
    return peak
