"""Sequences arrive, grow, fork, end and hit the cache, with any groups. Pages remember their
contents.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jengine.engine.page_events import (
    BlockRemoved,
    BlockStored,
    EventMaker,
    Group,
    digest_of,
    digests,
    hash_of,
)
from jengine.engine.page_transfer import Lookup
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.shape import CacheShape
from jengine.table.program_table import most_pages
from tests.scheduling.host_memory import HostMemory

GROUPS = [
    [None],
    [3],
    [None, 5, 5],
    [None, None],
    [4, None, 9],
]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)  # few ids: prefixes are often equal
LONGEST = 40


class BlocksMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 4),
        groups=st.sampled_from(GROUPS),
        more=st.integers(0, 10),
        prefix_caching=st.booleans(),
        host_pages=st.sampled_from([0, 1, 5, 50]),
        staged=st.integers(1, 6),
        gives=st.booleans(),
    )
    def start(self, page_size, groups, more, prefix_caching, host_pages, staged, gives):
        pages = 1 + more + sum(most_pages(LONGEST, window, page_size, 1) for window in groups)
        cache = CacheShape(
            page_size=page_size,
            num_pages=pages,
            windows=groups,
            prefix_caching=prefix_caching,
            host_pages=host_pages if prefix_caching else 0,
            staged=staged,
        )
        self.blocks = BlockManager(cache)
        self.changes, self.published = [], set()  # as a subscriber to page events knows them
        self.blocks.watch(self.changes.append)
        self.maker = EventMaker(page_size, [Group("full_attention")] * len(groups))
        self.host = HostMemory(self.page, self.set_page)
        # by sequence, the tokens to compute once its pages have come
        self.fetching: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}  # by sequence, those computed
        self.salts: dict[int, str | None] = {}
        self.held: dict[tuple[int, int, int], object] = {}  # (pool, page, offset) -> what was written there
        self.numbers = 0
        # what a store has of blocks, by their digest and group
        self.stored: dict[tuple[bytes, int], object] = {}
        if self.blocks.tier is not None and gives:
            self.blocks.tier.give = self.give

    def give(self, host, block, group, again):
        """The store gets a page, which never changes under its name."""
        content = self.host.page(host)
        assert self.stored.setdefault((digest_of(block), group), content) == content

    @precondition(lambda self: self.blocks.tier is not None)
    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, "a"]), lost=st.integers(0, 9))
    def load(self, tokens, salt, lost):
        """Pages of a prompt come from the store, except some."""
        groups = windows = self.blocks.windows
        size = self.blocks.page_size
        known = self.blocks.known(tokens, salt)
        known += [[False] * len(groups)] * ((len(tokens) - 1) // size - len(known))
        lookup = Lookup(salt, tokens, known, windows, size, 1)
        names = [*digests(salt, tokens, size)]
        there = {(i, group) for i, group in lookup.missing if (names[i], group) in self.stored}
        had, blocks = lookup.longest(), lookup.longest(there)
        assert had <= blocks
        places = lookup.needed(blocks)[: lost or None]
        assert {*lookup.needed(blocks)} <= there
        if not places:
            return
        for host, (i, group) in zip(self.blocks.receive(tokens, salt, places), places, strict=True):
            if host:
                self.host.put(host, self.stored[names[i], group])
        self.blocks.check_integrity()

    def page(self, pool, page):
        return {offset: self.held[pool, page, offset] for offset in range(self.blocks.page_size)}

    def set_page(self, pool, page, content):
        for offset, token in content.items():
            self.held[pool, page, offset] = token

    def swap(self):
        """Planned copies take place before anything else is copied or written."""
        if self.blocks.tier is not None and (swaps := self.blocks.tier.take_swaps()):
            self.host.swap(swaps)

    @precondition(lambda self: self.blocks.tier is not None)
    @rule(seed=st.integers(0, 99), share=st.sampled_from([0.3, 1.0]))
    def copies_end(self, seed, share):
        saved, staged = self.host.ended(random.Random(seed), share)
        self.blocks.tier.saved(saved)
        self.blocks.tier.landed(staged)

    @rule()
    def begin_plan(self):
        complete = self.blocks.land()
        self.swap()
        for number in complete:
            self.compute(number, self.fetching.pop(number))

    def content(self, number, group, at):
        return group, self.salts[number], tuple(self.tokens[number][: at + 1])

    def places(self, number, group, start):
        """Places of tokens from `start` on: position, and (pool, page, offset)."""
        size, pages = self.blocks.page_size, self.blocks._tables[number].pages[group]
        return [(at, (0, pages[at // size], at % size)) for at in range(start, len(self.tokens[number]))]

    @rule(tokens=TOKENS, salt=st.sampled_from([None, None, "a"]), fetch=st.booleans())
    def come(self, tokens, salt, fetch):
        hit = self.blocks.match(tokens, salt)
        if fetch:
            longer = self.blocks.match_both(tokens, salt, hit)
            assert longer is hit or (
                longer.fetches > 0 and longer.from_host == longer.tokens - hit.tokens > 0
            )
            hit = longer
        assert hit.tokens < len(tokens) and hit.tokens % self.blocks.page_size == 0
        if not self.blocks.available(self.blocks.needed(hit, len(tokens), 1)):
            return
        number, self.numbers = self.numbers, self.numbers + 1
        self.blocks.admit(number, hit, len(tokens), salt)
        self.tokens[number], self.salts[number] = tokens[: hit.tokens], salt
        self.swap()
        assert self.blocks.fetches(number) == (hit.fetches > 0)
        if hit.fetches:
            self.fetching[number] = tokens[hit.tokens :]
        else:
            self.compute(number, tokens[hit.tokens :])

    @property
    def ready(self):
        return sorted({*self.tokens} - {*self.fetching})

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data, tokens):
        number = data.draw(st.sampled_from(self.ready))
        self.compute(number, tokens[: LONGEST - len(self.tokens[number])])

    def compute(self, number, tokens):
        """Computes tokens while there is room, like a step: shared pages are copied, then tokens are written,
        then read.
        """
        known, blocks = self.tokens[number], self.blocks
        start = len(known)
        blocks.pass_windows(number, start)
        if not tokens or not blocks.available(blocks.copies([(number, start)])):
            return
        before = [pool.available for pool in blocks.pools]
        foreseen = blocks.copies([(number, start)])
        copies, _ = blocks.unshare(number, start)
        taken = [was - pool.available for was, pool in zip(before, blocks.pools, strict=True)]
        self.swap()
        assert taken == [foreseen[pool] for pool in range(len(blocks.pools))] and sum(taken) == len(copies)
        for pool, source, target in copies:
            for offset in range(blocks.page_size):
                self.held.pop((pool, target, offset), None)
                if (pool, source, offset) in self.held:
                    self.held[pool, target, offset] = self.held[pool, source, offset]
        end = blocks.room(number, start + len(tokens))
        assert start <= end <= start + len(tokens)
        entries = blocks.grow(number, end)
        assert all(page > 0 for _, _, page in entries)
        self.swap()
        known += tokens[: end - start]
        for group in range(len(blocks.windows)):
            for at, place in self.places(number, group, start):
                assert blocks.pools[0].holders(place[1]) == 1, "written while shared"
                assert not any(blocks._index.holds(g, place[1]) for g in range(len(blocks.windows)))
                self.held[place] = self.content(number, group, at)
        blocks.commit(number, known, len(known))
        self.read(number, start)

    def read(self, number, position):
        """The contents that queries from a position on attend to."""
        for group, window in enumerate(self.blocks.windows):
            for at, place in self.places(
                number, group, 0 if window is None else max(position - window + 1, 0)
            ):
                assert self.held[place] == self.content(number, group, at)

    @property
    def computed(self):
        """Sequences without pages for tokens that are still to be computed, as prompts have that paused."""
        ends = {number: self.blocks.pages_of(len(self.tokens[number])) for number in self.ready}
        return [
            number
            for number, end in ends.items()
            if all(len(pages) <= end for pages in self.blocks._tables[number].pages)
        ]

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), count=st.integers(1, 3), tokens=TOKENS)
    def fork(self, data, count, tokens):
        parent = data.draw(st.sampled_from(self.computed))
        for _ in range(count):
            child, self.numbers = self.numbers, self.numbers + 1
            self.blocks.fork(parent, child)
            self.tokens[child], self.salts[child] = [*self.tokens[parent]], self.salts[parent]
            self.compute(child, tokens[: LONGEST - len(self.tokens[child])])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def go(self, data):
        number = data.draw(st.sampled_from(sorted(self.tokens)))
        self.blocks.release(number)
        del self.tokens[number]
        self.fetching.pop(number, None)

    @rule()
    def reset(self):
        self.blocks.reset()
        assert self.blocks.cached == 0 and len(self.blocks._index._blocks) == 0

    @invariant()
    def integrity(self):
        if hasattr(self, "blocks"):
            self.blocks.check_integrity()
            assert self.blocks.numbers == {*self.tokens}
            for number in self.ready:
                self.read(number, len(self.tokens[number]))
            self.follow()
            index, tier = self.blocks._index, self.blocks.tier
            found = {
                ("GPU", group, block) for group, own in enumerate(index._holding) for block in own.values()
            }
            found |= (
                {("CPU", tier._owner[page][1], tier._owner[page][0]) for page in tier._kept}
                if tier
                else set()
            )
            assert self.published == {(medium, group, hash_of(block)) for medium, group, block in found}

    def follow(self):
        """What a subscriber does with the events since the last call."""
        changes, self.changes[:] = [*self.changes], []
        for event in self.maker.events(changes):
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * self.blocks.page_size
                assert len(event.extra_keys) == len(event.block_hashes)
                new = {(event.medium, event.group_idx, name) for name in event.block_hashes}
                assert len(new) == len(event.block_hashes) and not new & self.published
                self.published |= new
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.published.remove((event.medium, event.group_idx, name))
            else:
                self.published = {one for one in self.published if one[0] == "CPU"}

    def teardown(self):
        if hasattr(self, "blocks"):
            for number in [*self.tokens]:
                self.blocks.release(number)
            self.blocks.check_integrity()
            assert self.blocks.owned == 0
            self.blocks.reset()
            assert (
                len(self.blocks._index._blocks) == 0
                and sum(pool.free for pool in self.blocks.pools) == self.blocks.capacity
            )
            if self.blocks.tier is not None:
                self.swap()
                self.copies_end(0, 1.0)
                self.begin_plan()
                self.begin_plan()
                self.blocks.check_integrity()
                assert self.blocks.tier.used == 0, "a host page is lost"


BlocksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlocks = BlocksMachine.TestCase


@pytest.mark.full
class TestMoreBlocks(BlocksMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=40)
