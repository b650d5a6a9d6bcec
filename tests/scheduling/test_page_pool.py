"""No page is lost, given to two sequences by mistake, or evicted while a sequence holds it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.pages.block_table import PagePool


def nothing(page: int) -> None:
    pass


@given(
    st.integers(2, 20),
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "release", "keep", "forget"]), st.integers(0, 8)),
        max_size=80,
    ),
)
def test_any_sequence_of_actions(num_pages, actions):
    evicted = []
    pool, holders, cached = PagePool(num_pages, evicted.append), Counter(), []
    for action, number in actions:
        held = sorted(+holders)
        if action == "take" and number <= pool.available:
            before, count = [*cached], pool.free
            taken = pool.take(number)
            assert not {*taken} & {*held}
            cached = cached[max(number - count, 0) :]
            assert evicted == before[: len(before) - len(cached)], (
                "the least recently used first, and only when nothing is free"
            )
            evicted.clear()
            holders.update(taken)
        elif action == "take":
            with pytest.raises(ValueError, match=f"{pool.free} free, {pool.cached} cached"):
                pool.take(number)
        elif action == "share" and (held or cached):
            page = [*held, *cached][number % len([*held, *cached])]
            pool.share(page)
            cached = [other for other in cached if other != page]
            holders[page] += 1
        elif action in ("release", "keep") and held:
            page = held[number % len(held)]
            pool.release(page, keep=action == "keep")
            holders[page] -= 1
            cached += [page] * (action == "keep" and not holders[page])
        elif action == "forget":
            pool.forget()
            cached = []
        assert pool.free + pool.cached + pool.owned == pool.capacity == num_pages - 1
        assert (pool.cached, pool.owned) == (len(cached), len(+holders))
        pool.check_integrity(dict(+holders))


@pytest.mark.parametrize("page", [0, 3, 4])
def test_only_owned_pages_can_be_released(page):
    pool = PagePool(5, nothing)
    pool.take(2)
    with pytest.raises(ValueError, match="not owned"):
        pool.release(page, keep=False)


def test_a_page_is_freed_by_its_last_holder():
    pool = PagePool(3, nothing)
    (page,) = pool.take(1)
    pool.share(page)
    pool.release(page, keep=False)
    assert (pool.owned, pool.holders(page)) == (1, 1)
    pool.release(page, keep=False)
    assert (pool.owned, pool.free) == (0, 2)


def test_integrity_check_notices_a_lost_page():
    pool = PagePool(4, nothing)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity({})
