"""Looking up prompts: finds the longest hit, and repeats a lookup only after the cache has changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.pages.block_table import NO_HIT
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.shape import CacheShape
from tests.scheduling.strict_device import Loop

PAGES, PAGE_SIZE = 12, 4
GROUPS = [None, 9, None, 21]
TOKENS = list(range(PAGES * PAGE_SIZE + 1))


def is_hit(present: list[list[bool]], count: int) -> bool:
    """Whether each group has the tokens that the query after `count` pages attends to."""
    return all(
        all(pages[(0 if window is None else max(count * PAGE_SIZE - window + 1, 0) // PAGE_SIZE) : count])
        for window, pages in zip(GROUPS, present, strict=True)
    )


@given(lost=st.sets(st.tuples(st.integers(0, len(GROUPS) - 1), st.integers(0, PAGES - 1))))
def test_the_hit_is_the_longest_prefix_of_which_each_group_has_what_it_reads(lost):
    pages = 1 + len(GROUPS) * (PAGES + 1)
    cache = CacheShape(page_size=PAGE_SIZE, num_pages=pages, windows=GROUPS, prefix_caching=True)
    blocks = BlockManager(cache)
    blocks.admit(0, NO_HIT, len(TOKENS), None)
    blocks.grow(0, len(TOKENS))
    blocks.commit(0, TOKENS, len(TOKENS))
    chain = blocks.match(TOKENS, None).blocks
    assert len(chain) == PAGES
    for group, index in lost:
        blocks._index.forget(group, chain[index].pages[group])
    present = [[(group, index) not in lost for index in range(PAGES)] for group in range(len(GROUPS))]
    best = max(count for count in range(PAGES + 1) if is_hit(present, count))
    hit = blocks.match(TOKENS, None)
    assert hit.tokens == best * PAGE_SIZE and hit.blocks == chain[:best]


def test_a_prompt_that_waits_is_looked_up_once_for_each_change(monkeypatch):
    one = Loop(
        max_model_len=64, tile_size=8, page_size=4, num_pages=17, max_num_seqs=4, max_num_batched_tokens=72,
        prefix_caching=True
    )  # fmt: skip
    lookups = []
    match = one.scheduler.blocks.match
    monkeypatch.setattr(
        one.scheduler.blocks,
        "match",
        lambda tokens, *more: lookups.append(len(tokens)) or match(tokens, *more),
    )
    runs = one.add(list(range(1, 31)), max_tokens=20, ignore_eos=True)
    one.step(0)
    waits = one.add([*range(1, 29), *range(30)], max_tokens=2, ignore_eos=True)
    for _ in range(15):
        one.step(0)
    # as each of them came
    assert len(lookups) == 2 and one.scheduler.registry.num_waiting == 1 and not runs.finish_reason
    one.drain(0)
    assert waits.num_cached == 28 and waits.finish_reason == "length"
