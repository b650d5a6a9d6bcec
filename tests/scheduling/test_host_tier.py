"""Cached pages are copied to the host before they are lost, and fetched if that is faster than computing
them.
"""

from __future__ import annotations

from typing import Any

import pytest

from jengine.scheduling.costs.step_costs import SwapCosts
from jengine.scheduling.pages.block_table import NO_HIT, Hit, PageChange
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.shape import CacheShape
from tests.scheduling.strict_device import Loop

PAGE, LENGTH = 4, 24  # tokens of a page; of a prompt
FREE = SwapCosts(0.0, 0.0, 0.0)
SLOW = SwapCosts(0.0, 1e6, 0.0)


def make(*, pages: int = 10, host_pages: int = 40, swaps: SwapCosts = FREE, **options: Any) -> Loop:
    """A device that can hold one prompt with its output, but not two."""
    loop = Loop(
        max_model_len=32,
        tile_size=4,
        page_size=PAGE,
        num_pages=1 + pages,
        max_num_seqs=4,
        max_num_batched_tokens=36,
        prefix_caching=True,
        host_pages=host_pages,
        staged=16,
        **options,
    )
    loop.scheduler.predictor.costs.swaps = swaps
    loop.ending = 1.0
    return loop


def prompt(number: int, length: int = LENGTH) -> list[int]:
    return [(7 * number + i * i) % 50 for i in range(length)]


def answer(loop: Loop, number: int, **options: Any) -> int:
    """Runs a prompt alone. Returns the number of its tokens that were not computed."""
    sequence = loop.add(prompt(number), max_tokens=4, ignore_eos=True, **options)
    loop.drain(ahead=1)
    return sequence.num_cached


def test_what_was_evicted_comes_back() -> None:
    loop = make()
    for number in range(4):
        assert answer(loop, number) == 0
    computed = loop.device.prefilled
    for number in range(4):
        assert answer(loop, number) == LENGTH - PAGE, "whole pages, and never the last token"
    assert loop.device.prefilled - computed == 4 * PAGE
    scheduler, tier = loop.scheduler, loop.scheduler.blocks.tier
    assert tier is not None and tier.fetched >= 15 and tier.spilled >= 18 and tier.evictions == 0
    assert scheduler.prefixes.host_hits + scheduler.prefixes.hits == 4 * (LENGTH - PAGE)
    assert scheduler.prefixes.host_hits == PAGE * tier.fetched and scheduler.prefixes.host_declined == 0
    assert scheduler.prefixes.host_queries == scheduler.prefixes.queries - scheduler.prefixes.hits


def test_without_a_tier_all_of_it_is_computed_again() -> None:
    loop = make(host_pages=0)
    for number in [*range(4), *range(4)]:
        assert answer(loop, number) == 0
    assert loop.scheduler.take_swaps() is None and not loop.scheduler.registry.fetching


def test_computing_is_preferred_where_it_takes_less() -> None:
    loop = make(swaps=SLOW)
    for number in [*range(4), *range(4)]:
        answer(loop, number)
    tier = loop.scheduler.blocks.tier
    assert tier is not None and tier.fetched == 0 < tier.spilled
    assert loop.scheduler.prefixes.host_hits == 0 < loop.scheduler.prefixes.host_declined


def test_a_page_that_saves_no_tile_is_not_fetched() -> None:
    """Tiles are computed completely, so four tokens less in the remaining tile save almost nothing."""
    scheduler = make(swaps=SwapCosts(0.0, 1e-6, 0.0)).scheduler
    near, one, more = Hit([], 9), Hit([], 11, fetches=1, from_host=2), Hit([], 13, fetches=1, from_host=4)
    assert scheduler.prefixes.or_fetch(near, one, 12) == near._replace(from_host=2)
    assert scheduler.prefixes.or_fetch(near, more, 16) is more


def test_what_has_not_arrived_is_a_miss() -> None:
    loop = make()
    loop.ending = 0.0
    for number in [*range(3), *range(3)]:
        assert answer(loop, number) == 0
    tier = loop.scheduler.blocks.tier
    assert tier is not None and tier.spilled == tier.staged == 16, "no more than can be under way"
    assert loop.scheduler.prefixes.host_hits == loop.scheduler.prefixes.host_declined == 0
    loop.ending = 1.0
    answer(loop, 9)
    assert max(answer(loop, number) for number in range(3)) > 0


def test_a_small_host_evicts_the_least_recently_used() -> None:
    loop = make(host_pages=9)
    for number in range(6):
        answer(loop, number)
    tier = loop.scheduler.blocks.tier
    assert tier is not None and tier.evictions > 0 and tier.used == 9
    assert answer(loop, 0) == 0
    assert answer(loop, 5) > 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("ending", [0.2, 1.0])
def test_preempted_sequences_go_on_from_the_host(ahead: int, ending: float) -> None:
    """Four grow in a pool for two and a half. With a tier they compute less, and end as alone either way."""
    computed = {}
    for host_pages in (0, 60):
        loop = make(pages=20, host_pages=host_pages)
        loop.ending = ending
        for number in range(8):
            loop.add(prompt(number, 12), max_tokens=20, ignore_eos=True)
        loop.drain(ahead)
        assert loop.scheduler.registry.num_preemptions == sum(loop.scheduler.prefixes.resumptions) > 0
        swapped = loop.scheduler.prefixes.resumptions[1]
        assert (swapped > 0) == (host_pages > 0)
        computed[host_pages] = loop.device.prefilled
    tier = loop.scheduler.blocks.tier
    assert tier is not None and tier.fetched > 0
    assert computed[60] < computed[0]


def test_salts_and_resets() -> None:
    loop = make()
    for number in range(3):
        answer(loop, number, salt="a")
    assert answer(loop, 0) == answer(loop, 0, salt="b") == 0
    assert answer(loop, 0, salt="a") == LENGTH - PAGE
    events = list[PageChange]()
    loop.scheduler.blocks.watch(events.append)
    loop.scheduler.blocks.reset()
    assert [event.kind for event in events] == ["cleared"]
    for number in range(3):
        assert answer(loop, number, salt="a") == 0


def test_a_store_gets_pages_again_that_it_may_have_lost() -> None:
    loop, given = make(), {False: list[int](), True: list[int]()}
    tier = loop.scheduler.blocks.tier
    assert tier is not None
    tier.give = lambda host, block, group, again: given[again].append(host)
    for _ in range(3):
        answer(loop, 0)
    while tier.saving:
        loop.step(ahead=1)
    assert len(given[False]) == len({*given[False]}) > 0 and {*given[True]} <= {*given[False]} and given[True]


@pytest.mark.parametrize("event", ["abort", "reset", "preempt"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_while_pages_are_on_their_way(event: str, steps: int) -> None:
    """Whatever happens to a sequence that waits for its pages, no pages are lost and answers do not
    change.
    """
    loop = make()
    for number in range(3):
        answer(loop, number)
    loop.ending = 0.3
    sequence = loop.add(prompt(0), max_tokens=4, ignore_eos=True)
    loop.step(ahead=1)
    assert loop.scheduler.registry.fetching
    for _ in range(steps - 1):
        loop.step(ahead=1)
    if event == "abort":
        loop.abort(sequence)
    elif event == "reset":
        loop.scheduler.blocks.reset()
    elif sequence.slot:
        loop.scheduler.registry.preempt(sequence)
    loop.check()
    loop.drain(ahead=1)
    loop.ending = 1.0
    assert answer(loop, 0) in ((0, LENGTH - PAGE) if event == "reset" else (LENGTH - PAGE,))


def test_others_run_meanwhile() -> None:
    """A sequence that waits for pages does not block those behind it."""
    loop = make(pages=16)
    for number in range(4):
        answer(loop, number)
    loop.ending = 0.0
    first = loop.add(prompt(0), max_tokens=2, ignore_eos=True)
    second = loop.add(prompt(9, 8), max_tokens=2, ignore_eos=True)
    for _ in range(6):
        loop.step(ahead=1)
    assert (
        loop.scheduler.registry.fetching and second.finish_reason == "length" and not first.output_token_ids
    )
    loop.ending = 1.0
    loop.drain(ahead=1)
    assert first.num_cached == LENGTH - PAGE


def test_those_that_begin_alike_fetch_once() -> None:
    loop = make(pages=24)
    for number in range(6):
        answer(loop, number)
    tier = loop.scheduler.blocks.tier
    assert tier is not None
    before = tier.fetched
    together = [
        loop.add([*prompt(0), number], max_tokens=2, ignore_eos=True, n=1 + number % 2) for number in range(3)
    ]
    loop.drain(ahead=1)
    assert tier.fetched - before == LENGTH // PAGE
    assert [sequence.num_cached for sequence in together] == [LENGTH] * 3


def test_a_page_of_a_store_that_is_on_the_device_is_left_out() -> None:
    """Its request was slower than another that computed the same prompt."""
    cache = CacheShape(page_size=4, num_pages=1 + 20, prefix_caching=True, host_pages=8, staged=8)
    blocks, tokens = BlockManager(cache), [*range(9)]
    assert blocks.tier is not None
    blocks.tier.give = lambda host, block, group: None
    blocks.admit(0, NO_HIT, 9, None)
    blocks.grow(0, 9)
    blocks.commit(0, tokens, 8)
    blocks.release(0)
    assert blocks.receive(tokens[:8], None, [(0, 0), (1, 0)]) == [0, 0]
    blocks.land()
    blocks.check_integrity()


@pytest.mark.parametrize("pages", [33, 34, 36])
def test_two_fetched_prompts_behind_a_window_do_not_wait_for_each_other(pages: int) -> None:
    loop = Loop(
        max_model_len=96,
        tile_size=16,
        page_size=4,
        num_pages=1 + pages,
        max_num_seqs=4,
        max_num_batched_tokens=36,
        windows=(None, 64),
        prefix_caching=True,
        host_pages=200,
        staged=16,
    )
    loop.scheduler.predictor.costs.swaps = SwapCosts(0.0, 0.0, 0.0)
    loop.ending = 1.0

    def prompt(kind: int, length: int) -> list[int]:
        return [(kind * 37 + i * i * 7 + i) % 50 for i in range(length)]

    for kind, length in ((1, 33), (2, 33), *((kind, 56) for kind in range(3, 9))):
        loop.add(prompt(kind, length), max_tokens=2, ignore_eos=True)
        loop.drain(1)
    both = [
        loop.add(prompt(kind, 20) + prompt(10 + kind, more), max_tokens=2, ignore_eos=True)
        for kind, more in ((1, 36), (2, 4))
    ]
    for _ in range(60):
        loop.step(ahead=1)
    assert all(sequence.finish_reason == "length" for sequence in both)
