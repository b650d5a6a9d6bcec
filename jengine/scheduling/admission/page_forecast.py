"""Predicts the maximum number of pages that running sequences will hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Growth(NamedTuple):
    """A sequence's current tokens, and the number expected until it ends and frees its pages."""

    tokens: int
    rest: int


def peak_pages(sequences: Iterable[Growth], page_size: int, most: Sequence[int | None] = (None,)) -> int:
    """Upper bound on the pages held at once, if every sequence gets a token per step and ends at its expected
    length.

    The maximum occurs just before a sequence ends. At that moment every longer sequence has grown by the
    tokens that the ending one had left. So only these moments are checked (as in the Past-Future scheduler,
    Gong et al., 2025).

    Args:
        most: for each cache group, the maximum number of pages that a sequence holds; None: as many as its
            tokens need.
    """
    tokens = peak = 0
    for count, growth in enumerate(sorted(sequences, key=lambda growth: -growth.rest), 1):
        tokens += growth.tokens
        # the last page of each sequence may be nearly empty
        pages = -(-(tokens + count * (growth.rest + page_size - 1)) // page_size)
        peak = max(peak, sum([pages if limit is None else min(pages, count * limit) for limit in most]))
    return peak
