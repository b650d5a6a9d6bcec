"""How many drafts pay."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.costs.draft_costs import WORTH, Bucket, Offer, all_of_them, could_pay, most_a_second


def test_padding_is_filled_while_reading_contexts_pays() -> None:
    offer = Offer(1, 1.0, [0.9, 0.5, 0.01], [0.1, 0.1, 0.1], [Bucket(7, 1.0)])
    assert most_a_second(offer) == 2 and all_of_them(offer) == 3
    assert most_a_second(offer._replace(contexts=[0.0] * 3)) == 3


def test_a_larger_program_pays_if_enough_drafts_are_likely() -> None:
    buckets = [Bucket(0, 1.0), Bucket(1, 1.3), Bucket(3, 1.6), Bucket(7, 4.0)]
    for chances, count in (([0.2], 0), ([0.5], 1), ([0.9, 0.8, 0.7], 3), ([0.9] * 7, 3), ([], 0)):
        assert most_a_second(Offer(1, 1.0, chances, [0.0] * len(chances), buckets)) == count


def test_a_token_that_is_due_limits_drafts() -> None:
    offer = Offer(2, 1.0, [1.0] * 6, [0.1] * 6, [Bucket(2, 1.0), Bucket(6, 1.5)])
    assert most_a_second(offer) == 6
    assert [most_a_second(offer._replace(limit=limit)) for limit in (2.05, 1.95, 1.15, 0.5)] == [5, 2, 1, 0]
    assert not could_pay(offer._replace(limit=0.5))


offers = st.builds(
    lambda rows, seconds, chances, context, buckets: Offer(
        rows,
        seconds,
        sorted(chances, reverse=True),
        [context] * len(chances),
        [Bucket(drafts, seconds + more) for drafts, more in zip(*map(sorted, buckets), strict=True)],
    ),
    st.integers(1, 8),
    st.floats(0.1, 2.0),
    st.lists(st.floats(0.0, 1.0), max_size=9),
    st.floats(0.0, 0.3),
    st.integers(0, 4).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 12), min_size=n, max_size=n),
            st.lists(st.floats(0.0, 3.0), min_size=n, max_size=n),
        )
    ),
)


@given(offers)
def test_no_other_number_gives_more(offer: Offer) -> None:
    def rate(count: int) -> float:
        """The cheapest program that has rows for this many drafts, which is the first."""
        if not count:
            return offer.tokens / offer.seconds
        seconds = next((bucket.seconds for bucket in offer.buckets if bucket.drafts >= count), math.inf)
        return (offer.tokens + sum(offer.chances[:count])) / (seconds + sum(offer.contexts[:count]))

    found = most_a_second(offer)
    best = max(map(rate, range(len(offer.chances) + 1)))
    if found:
        assert math.isclose(rate(found), best, rel_tol=1e-9)
        assert could_pay(offer) and best > WORTH * rate(0) * (1 - 1e-9)
    else:
        assert best <= WORTH * rate(0) * (1 + 1e-9)
