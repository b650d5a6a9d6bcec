"""Pages that several sequences share, case by case: prefixes, samples of one prompt, windows, salts."""

from __future__ import annotations

import pytest

from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.sequence import State
from jengine.scheduling.shape import CacheShape
from tests.scheduling.strict_device import Loop

NO_END = {"ignore_eos": True}
PROMPT = list(range(1, 31))  # 7 pages and 2 tokens


def loop(**options):
    defaults = {
        "max_model_len": 64,
        "tile_size": 8,
        "page_size": 4,
        "num_pages": 200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 72,
    }
    return Loop(**{"prefix_caching": True, **defaults, **options})


def computed(loop: Loop, ahead: int = 1) -> int:
    """Number of prompt tokens computed in steps until all requests have ended."""
    before = loop.device.prefilled
    loop.drain(ahead)
    return loop.device.prefilled - before


def test_a_prompt_is_found_by_whole_pages_and_never_whole():
    one = loop()
    one.add(PROMPT, max_tokens=1)
    assert computed(one) == 30
    for prompt, new in [
        (PROMPT, 2),
        (PROMPT[:28], 4),
        (PROMPT[:27], 3),
        ([*PROMPT[:20], *PROMPT], 30),
        ([9, *PROMPT], 31),
    ]:
        sequence = one.add(prompt, max_tokens=1)
        assert computed(one) == new == len(prompt) - sequence.num_cached
    assert one.scheduler.prefixes.hits == 28 + 24 + 24 + 20
    assert one.scheduler.blocks.hit_pages == {"full": 7 + 6 + 6 + 5}


def test_the_next_turn_of_a_chat_finds_the_answer_as_well():
    one = loop()
    first = one.add(PROMPT, max_tokens=20, **NO_END)
    computed(one)
    one.add([*first.tokens, 7, 7, 7], max_tokens=1)
    assert computed(one) == 53 - 48  # of 50 tokens the last was never an input


@pytest.mark.parametrize("ahead", [0, 1])
def test_followers_of_a_cold_prefix_compute_none_of_it(ahead):
    """They arrive together; a step fits all of them, or only part of the first."""
    for tokens in (8 * 8 + 8, 8 + 8):
        one = loop(max_num_batched_tokens=tokens)
        for i in range(6):
            one.add([*PROMPT[:28], 40 + i, i], max_tokens=4, **NO_END)
        assert computed(one, ahead) == 28 + 6 * 2


def test_pages_that_others_hold_cost_nothing_again():
    """So a prompt is admitted beside one that it shares pages with, though few pages are free."""
    one = loop()
    one.add(PROMPT, max_tokens=4, **NO_END)
    one.step(0)
    blocks = one.scheduler.blocks
    hit = blocks.match(PROMPT, None)
    assert hit.tokens == 28
    assert blocks.needed(hit, len(PROMPT), 1) == {0: 1}, "the eighth page; seven are held by the first"
    one.drain(0)
    assert blocks.needed(blocks.match(PROMPT, None), len(PROMPT), 1) == {0: 8}, "cached pages are free ones"


def test_nothing_is_found_without_prefix_caching():
    one = loop(prefix_caching=False)
    for _ in range(2):
        one.add(PROMPT, max_tokens=1)
        assert computed(one) == 30
    assert one.scheduler.prefixes.queries == one.scheduler.blocks.cached == 0


def test_salts_share_nothing():
    one = loop()
    for salt, new in [(None, 30), ("a", 30), ("b", 30), ("a", 2), ("b", 2), (None, 2)]:
        one.add(PROMPT, salt=salt, max_tokens=1)
        assert computed(one) == new


def test_scored_prompts_are_computed_and_can_be_found():
    one = loop()
    for scored, new in [(1, 30), (1, 30), (None, 2)]:
        one.add(PROMPT, prompt_logprobs=scored, max_tokens=1)
        assert computed(one) == new


def test_a_reset_forgets_what_was_and_what_runs():
    one = loop()
    one.add(PROMPT, max_tokens=30, **NO_END)
    one.step(ahead=0)
    one.scheduler.blocks.reset()
    computed(one)
    assert one.scheduler.blocks.cached == 0
    one.add(PROMPT, max_tokens=1)
    assert computed(one) == 30


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("length", "copies"), [(30, 3), (28, 0)])
def test_samples_share_their_prompt_and_copy_what_they_write(length, copies, prefix_caching):
    """The last of them to write a shared page keeps it."""
    one = loop(prefix_caching=prefix_caching)
    one.add(PROMPT[:length], n=4, max_tokens=12, temperature=1.0, **NO_END)
    one.step(ahead=0)
    assert one.scheduler.registry.num_running == 4 and one.scheduler.blocks.owned == -(-length // 4)
    assert computed(one) == 0 and one.device.copies == copies
    assert len({tuple(tokens) for tokens in one.outputs.values()}) == 4
    assert [s.num_cached for s in one.sequences] == [0, length, length, length]


def test_samples_that_find_no_slot_find_the_pages_later():
    one = loop(max_num_seqs=3, max_num_batched_tokens=3 + 64)
    one.add(PROMPT, n=5, max_tokens=6, **NO_END)
    assert computed(one) == 30 + 2  # the fourth computes what follows the whole pages, the fifth shares that


def test_samples_end_one_by_one():
    """If the other owner of a page ends before it is written, the page is not copied."""
    one = loop()
    one.add(PROMPT, n=2, max_tokens=9, **NO_END)
    one.step(ahead=0)
    one.abort(one.sequences[0])
    computed(one)
    assert one.device.copies == 0


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_preempted_sequence_resumes_by_a_hit(ahead):
    one = loop(num_pages=1 + 18)
    one.add([1] * 21, max_tokens=30, **NO_END)
    last = one.add([2] * 21, max_tokens=30, **NO_END)
    while not last.num_preemptions:
        one.step(ahead)
    assert last.state is State.WAITING and one.scheduler.blocks.cached > 0
    one.drain(ahead)
    assert one.exhausted and one.device.hits > 0


def test_the_least_recently_used_tail_is_evicted_first():
    one = loop(num_pages=1 + 16)
    for first in (1, 2):
        one.add([first] * 28, max_tokens=1)
        computed(one)
    assert (one.scheduler.blocks.cached, one.scheduler.blocks.evictions) == (14, 0)
    one.add([3] * 20, max_tokens=1)  # 5 pages, of which 2 are free
    computed(one)
    assert one.scheduler.blocks.evictions == 3
    for prompt, new in [([2] * 28, 4), ([1] * 16, 4), ([1] * 28, 12)]:
        one.add(prompt, max_tokens=1)
        assert computed(one) == new


WINDOWS = [None, 10]


def test_pages_behind_a_window_are_given_up():
    """A query sees 9 tokens before it: with the 8 that a prefill computes at a time, they lie in at most 5
    pages of 4.
    """
    long = loop(windows=WINDOWS, max_num_seqs=1, max_num_batched_tokens=1 + 8, prefix_caching=False)
    long.add(PROMPT, max_tokens=30, **NO_END)
    most = 0
    while long.step(ahead=0):
        table = long.scheduler.blocks._tables[0] if long.scheduler.registry.num_running else None
        most = max(most, 0 if table is None else sum(page > 0 for page in table.pages[1]))
    assert most == 5
    long.drain(ahead=0)


def test_a_hit_needs_what_the_window_sees_and_no_more():
    one = loop(windows=WINDOWS, max_num_batched_tokens=8 + 8)
    sequence = one.add(PROMPT, max_tokens=30, **NO_END)
    computed(one)
    before = one.scheduler.blocks.hit_pages.copy()
    one.add([*sequence.tokens[:58], 7], max_tokens=1)
    assert computed(one) == 59 - 56
    after = one.scheduler.blocks.hit_pages
    assert {name: after[name] - before[name] for name in after} == {"full": 14, "window[10]": 3}


def test_a_window_shorter_than_its_hit_is_found_further_back():
    """The window's last pages are gone, the full group's are there: the hit ends where the window's begin to
    be missing.
    """
    manager = BlockManager(CacheShape(page_size=4, num_pages=40, windows=[None, 6], prefix_caching=True))
    manager.admit(0, manager.match(PROMPT, None), len(PROMPT), None)
    manager.grow(0, len(PROMPT))
    manager.commit(0, PROMPT, len(PROMPT))
    tail = manager._tables[0].pages[1][5]
    manager.release(0)
    assert manager.match(PROMPT, None).tokens == 28
    manager._forget(range(2), tail)
    assert manager.match(PROMPT, None).tokens == 20
    manager.pools[0]._cached.pop(tail)
    manager.pools[0]._free.append(tail)
    manager.check_integrity()


def test_pages_and_states_are_counted_apart():
    manager = BlockManager(CacheShape(page_size=4, num_pages=10, num_states=2, prefix_caching=True))
    hit = manager.match(PROMPT, None)
    assert manager.needed(hit, 12, 1) == {0: 3, 1: 1} and manager.available(manager.needed(hit, 12, 1))
    assert not manager.available(manager.needed(hit, 40, 1))
    manager.admit(0, hit, 12, None, PROMPT)
    assert [pool.available for pool in manager.pools] == [6, 0]
    assert not manager.available(manager.needed(hit, 4, 1))
    manager.release(0)
    manager.check_integrity()
