"""No page is lost, shared or handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.page_pool import PagePool


@given(st.integers(2, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_any_sequence_of_allocations_and_releases(num_pages, actions):
    pool, holdings = PagePool(num_pages), []
    for take, number in actions:
        if take and number <= pool.free:
            holdings.append(pool.allocate(number))
            assert len(holdings[-1]) == number
        elif take:
            with pytest.raises(ValueError, match=f"{pool.free} free"):
                pool.allocate(number)
        elif holdings:
            pool.release(holdings.pop(number % len(holdings)))
        held = [page for pages in holdings for page in pages]
        assert len(set(held)) == len(held) == pool.owned
        assert set(held) <= set(range(1, num_pages))
        assert pool.free + pool.owned == pool.capacity == num_pages - 1
        pool.check_integrity()


@pytest.mark.parametrize("pages", [[0], [3], [1, 1], [7]])
def test_only_owned_pages_can_be_released_and_only_once(pages):
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(ValueError, match="not all owned"):
        pool.release(pages)
    pool.check_integrity()
    assert pool.owned == 2


def test_tails_are_reused_first_and_the_longest_free_before_them():
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.release(pages)
    assert pool.allocate(5) == [4, 5, *reversed(pages)]


def test_integrity_check_notices_a_lost_page():
    pool = PagePool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
