"""Owners of pages: block tables of running sequences, which share pages of equal prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile

from jengine.scheduling.pages.block_table import (
    NO_HIT,
    STATES,
    TOKENS,
    Block,
    BlockTable,
    Changed,
    Copy,
    Entry,
    Hit,
    PagePool,
    Ranges,
    Salt,
)
from jengine.scheduling.pages.host_tier import Fetch, HostTier
from jengine.scheduling.pages.prefix_index import LAST_PAGE, PrefixIndex
from jengine.scheduling.pages.states import States
from jengine.scheduling.shape import CacheShape
from jengine.table.program_table import most_pages, pages_of


class BlockManager:
    """Block tables by sequence number, over one pool of pages.

    Sequences whose tokens are equal up to the end of a page share that page. Only its single holder may write
    to a page. A page can be found once all of its tokens are known and their step is planned: steps run in
    the order in which they are planned, and each layer writes keys and values before it reads any.

    Args:
        cache: sizes and numbers of pages.
        hit_grid: hits are multiples of this number of tokens, which is a multiple of the page size; None: the
            page size.
        generated: whether recurrent states of generated tokens are kept for later requests.

    Attributes:
        pools: of pages for tokens and, if the model has any, of recurrent states, which form one more group.
        tier: the host tier, which needs prefix_caching.
        states: the recurrent states, if the model has them.
    """

    def __init__(self, cache: CacheShape, *, hit_grid: int | None = None, generated: bool = True) -> None:
        self.page_size, self.windows = cache.page_size, tuple(cache.windows)
        self.prefix_caching, self.hit_grid = cache.prefix_caching, hit_grid or cache.page_size
        count, recurrent = len(self.windows), cache.num_states > 0
        self._pool = PagePool(cache.num_pages, partial(self._forget, range(count)))
        self.pools = [self._pool]
        names = ["full" if window is None else f"window[{window}]" for window in self.windows]
        self._names = [*names, "state"] if recurrent else names
        self.hit_pages = dict.fromkeys(self._names, 0)  # pages found, by group name
        self._windowed = [i for i, window in enumerate(self.windows) if window is not None]
        windows = [*self.windows, LAST_PAGE] if recurrent else self.windows
        self._index = PrefixIndex(self.page_size, windows, self.hit_grid)
        self._tables: dict[int, BlockTable] = {}
        self.states: States | None = None
        if recurrent:
            self.pools.append(PagePool(cache.num_states, partial(self._forget, range(count, count + 1))))
            where = self.pools[STATES], self._index, count, self.page_size, self.commit
            self.states = States(*where, cache.draft_states, generated=generated)
        self.tier: HostTier | None = None
        if cache.host_pages:
            self.tier = HostTier(cache.host_pages, min(cache.staged, cache.host_pages), self._index)

    # --- pages ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of pages for tokens, as in the counts below; none of states."""
        return self._pool.capacity

    @property
    def owned(self) -> int:
        return self._pool.owned

    @property
    def cached(self) -> int:
        """Number of pages that no sequence holds but that can be found."""
        return self._pool.cached

    @property
    def evictions(self) -> int:
        """Number of cached pages that were reused for other tokens."""
        return self._pool.evictions

    def watch(self, changed: Changed) -> None:
        """`changed` is called with every change of what can be found, in order."""
        self._index.changed = changed

    @property
    def version(self) -> int:
        """Changes when a page becomes findable or stops being so. Until then, `match` returns the same."""
        return self._index.version

    def pages_of(self, tokens: int) -> int:
        """Number of pages of each group that hold this many tokens."""
        return pages_of(tokens, self.page_size)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the sequences that have a block table."""
        return {*self._tables}

    def held(self, number: int) -> int:
        """Number of pages in a sequence's block table, shared ones included. Thread-safe."""
        table = self._tables.get(number)
        return 0 if table is None else sum(len(table.held(group)) for group in range(len(self.windows)))

    def new_pages(self, count: int) -> Counter[int]:
        """Pages needed from each pool when `count` sequences enter a new page in each group."""
        return Counter({TOKENS: count * len(self.windows)})

    def available(self, wanted: Counter[int]) -> bool:
        """Whether every pool can supply the wanted pages."""
        return all(self.pools[pool].available >= count for pool, count in wanted.items())

    # --- admission --------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: Salt, whole: Ranges = ()) -> Hit:
        """The longest cached prefix: a multiple of hit_grid, without the last token, which must always be
        computed. It ends within none of these ranges of tokens.
        """
        if not self.prefix_caching:
            return NO_HIT
        blocks = self._index.longest(tokens, salt, whole=whole)
        return Hit(blocks, len(blocks) * self.page_size)

    def match_both(self, tokens: Sequence[int], salt: Salt, hit: Hit, whole: Ranges = ()) -> Hit:
        """The longest prefix on device and host together, if longer than `hit`, on the device alone."""
        if self.tier is None:
            return hit
        blocks = self._index.longest(tokens, salt, self.tier.find, whole)
        length = len(blocks) * self.page_size
        return (
            Hit(blocks, length, len(self._index.missing(blocks)), length - hit.tokens)
            if length > hit.tokens
            else hit
        )

    def known(self, tokens: Sequence[int], salt: Salt) -> list[list[bool]]:
        """For each known block of a prefix, whether each group's page is on the device or the host."""
        assert self.tier is not None
        find, limit = self.tier.find, (len(tokens) - 1) // self.page_size
        return [
            [bool(page or find(block, group)) for group, page in enumerate(block.pages)]
            for block in self._index.chain(salt, tokens, limit, ())
        ]

    def receive(self, tokens: Sequence[int], salt: Salt, pages: Sequence[tuple[int, int]]) -> list[int]:
        """Keeps pages that a store has of these tokens' blocks, (index of the block, group). Returns the host
        pages to put them into; 0 where there is no room or a copy on the host.
        """
        assert self.tier is not None
        size, blocks = self.page_size, list[Block]()
        for start in range(0, size * (1 + max(index for index, _ in pages)), size):
            parent = blocks[-1] if blocks else salt
            blocks.append(self._index.get(parent, tuple(tokens[start : start + size])))
        self._index.use(blocks[-1])  # while room is made
        hosts = [self.tier.receive(blocks[index], group) for index, group in pages]
        self._index.unuse(blocks[-1])
        return hosts

    def coming(self, hit: Hit) -> bool:
        """Whether pages of a hit are being fetched for others, and will be on the device."""
        tier = self.tier
        if tier is None or not hit.fetches:
            return False
        return any(tier.coming(hit.blocks[index], group) for group, index in self._index.missing(hit.blocks))

    def needed(self, hit: Hit, tokens: int, ahead: int) -> Counter[int]:
        """Pages needed from each pool to admit a sequence. Pages of the hit that other sequences own cost
        nothing.

        Args:
            tokens: number of known tokens. Groups without a window get pages for all of them at once, the
                others as they are computed.
            ahead: minimum number of tokens computed at a time.
        """
        wanted: Counter[int] = Counter()
        for group, window in enumerate(self.windows):
            first, holders = self._index.first_seen(group, hit.tokens), self._pool.holders
            shared = sum(holders(block.pages[group]) > 0 for block in hit.blocks[first:])
            limit = most_pages(tokens, window, self.page_size, ahead)
            wanted[TOKENS] += max(min(self.pages_of(tokens) - first, limit) - shared, 0)
        if self.states is not None:
            wanted[STATES] += self.states.needed(hit.blocks)
        return wanted

    @property
    def forked(self) -> Counter[int]:
        """Pages needed from each pool for one more sample of a prompt."""
        return Counter() if self.states is None else Counter({STATES: 2})

    def admit(self, number: int, hit: Hit, tokens: int, salt: Salt, known: Sequence[int] = ()) -> None:
        """Creates a sequence's block table: the pages of the hit and, for groups without a window, pages for
        all known tokens.

        Args:
            known: the known tokens, for a model with recurrent states.

        Pages of the hit that are on the host are fetched. The sequence waits until they have arrived (see
        `land`).
        """
        firsts = [self._index.first_seen(group, hit.tokens) for group in range(len(self.windows))]
        pages = [
            [0] * first + [block.pages[group] for block in hit.blocks[first:]]
            for group, first in enumerate(firsts)
        ]
        table = BlockTable(pages, firsts, [*firsts], salt, self.prefix_caching, [*hit.blocks])
        self._enter(number, table)  # first: taking pages could evict those of the hit
        if self.states is not None:
            branch = self._index.branch(known, salt) if self.prefix_caching else 0
            self.states.admit(number, hit.blocks, branch, findable=self.prefix_caching)
            self.hit_pages["state"] += bool(hit.blocks)
        for group, first in enumerate(firsts):
            self.hit_pages[self._names[group]] += len(hit.blocks) - first
        if self.tier is not None and hit.fetches:
            self._fetch(self.tier, number, table)
        for group, window in enumerate(self.windows):
            if window is None:
                self._grow(table, group, self.pages_of(tokens))

    def _fetch(self, tier: HostTier, number: int, table: BlockTable) -> None:
        """Allocates pages for blocks that are only on the host, and fetches them, the last first."""
        missing = self._index.missing(table.blocks)
        # pin all first: taking pages could evict them too
        hosts = [tier.pin(table.blocks[index], group) for group, index in missing]
        for (group, index), host in zip(missing, hosts, strict=True):
            (page,) = self._pool.take(1)
            table.pages[group][index] = page
            self.hit_pages[self._names[group]] -= 1
            tier.fetch(Fetch(number, table.blocks[index], group, host, page))

    def fork(self, number: int, child: int) -> None:
        """Gives `child` the same tokens and pages. Both must `unshare` an incomplete page to write to it."""
        parent = self._tables[number]
        table = BlockTable(
            [[*p] for p in parent.pages],
            [*parent.first],
            [*parent.first],
            parent.salt,
            parent.findable,
            [*parent.blocks],
        )
        self._enter(child, table)
        if self.states is not None:
            self.states.fork(number, child)

    def replace(self, number: int, child: int) -> None:
        """`fork` for a child that gives up its block table. Equal entries are not sent again."""
        old = self._tables.pop(child)
        self.fork(number, child)  # first, so that pages which both hold stay held
        new = self._tables[child]
        for group, pages in enumerate(new.pages):
            known = zip(old.pages[group][: old.sent[group]], pages, strict=False)
            new.sent[group] = sum(1 for _ in takewhile(lambda both: both[0] == both[1], known))
        self._release_pages(old)

    def empty(self, number: int, salt: Salt) -> None:
        """Gives a sequence an empty block table, releasing the previous one if any."""
        if number in self._tables:
            self.release(number)
        self.admit(number, NO_HIT, 0, salt)

    # --- growth -----------------------------------------------------------------------------------

    def pass_windows(self, number: int, position: int) -> None:
        """Releases the pages that no query at or after this position attends to."""
        if self._windowed:
            table = self._tables[number]
            for group in self._windowed:
                first = min(self._index.first_seen(group, position), len(table.pages[group]))
                for index in range(table.first[group], first):
                    self._release(group, table.pages[group][index])
                    table.pages[group][index] = 0
                table.first[group] = max(first, table.first[group])

    def room(self, number: int, end: int) -> int:
        """Number of a sequence's tokens, up to `end`, that have pages or can get them."""
        table, pages = self._tables[number], self.pages_of(end)
        while True:
            missing = sum([max(pages - len(held), 0) for held in table.pages])
            if self._pool.available >= missing:
                return min(end, pages * self.page_size)
            pages -= 1

    def grow(self, number: int, tokens: int) -> list[Entry]:
        """Allocates missing pages for a sequence's first tokens. Returns entries that the device lacks."""
        table, pages, entries = self._tables[number], self.pages_of(tokens), []
        for group, pages_of_group in enumerate(table.pages):
            self._grow(table, group, pages)
            known = max(table.sent[group], table.first[group])
            if known < pages:
                entries += [(group, index, pages_of_group[index]) for index in range(known, pages)]
                table.sent[group] = pages
        return entries

    def copies(self, writers: Iterable[tuple[int, int]]) -> Counter[int]:
        """Pages needed to `unshare` these sequences at these positions, in turn."""
        wanted: Counter[int] = Counter()
        holders: dict[int, int] = {}
        for number, position in writers:
            index = position // self.page_size
            for pages in self._tables[number].pages:
                if index < len(pages):
                    left = holders.setdefault(pages[index], self._pool.holders(pages[index]))
                    wanted[TOKENS] += left > 1
                    holders[pages[index]] = left - 1
        return wanted

    def unshare(self, number: int, position: int) -> tuple[list[Copy], list[Entry]]:
        """Copies the page of this position if others share it, so that the sequence may write to it."""
        table, index = self._tables[number], position // self.page_size
        copies, entries = [], []
        for group, pages in enumerate(table.pages):
            if index < len(pages) and self._pool.holders(source := pages[index]) > 1:
                (target,) = self._pool.take(1)
                self._release(group, source)
                pages[index] = target
                copies.append(Copy(TOKENS, source, target))
                entries.append((group, index, target))
        return copies, entries

    def commit(self, number: int, tokens: Sequence[int], count: int) -> None:
        """Makes whole pages of a sequence's first tokens, all known and planned, findable."""
        table = self._tables[number]
        if not table.findable or count // self.page_size <= len(table.blocks):
            return
        last = table.blocks[-1] if table.blocks else None
        for index in range(len(table.blocks), count // self.page_size):
            parent = table.blocks[-1] if table.blocks else table.salt
            block = self._index.get(
                parent, tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            )
            for group, pages in enumerate(table.pages):
                if pages[index]:
                    self._index.hold(block, group, pages[index])
            table.blocks.append(block)
        self._index.use(table.blocks[-1])
        if last is not None:
            self._index.unuse(last)
        if self.states is not None:
            self.states.commit(number, table.blocks)

    # --- release ----------------------------------------------------------------------------------

    def release(self, number: int) -> None:
        """Releases a sequence's pages, the last first, so the beginning of a prefix is evicted last."""
        if self.tier is not None:
            self.tier.cancel(number)
        self._release_pages(self._tables.pop(number))
        if self.states is not None:
            self.states.release(number)

    def _release_pages(self, table: BlockTable) -> None:
        for index in reversed(range(max(map(len, table.pages)))):
            for group, pages in enumerate(table.pages):
                if table.first[group] <= index < len(pages):
                    self._release(group, pages[index])
        if table.blocks:
            self._index.unuse(table.blocks[-1])

    def reset(self) -> None:
        """Forgets all cached pages, and those that running sequences have already computed."""
        self._index.clear()
        if self.tier is not None:
            self.tier.reset()
        for pool in self.pools:
            pool.forget()
        for table in self._tables.values():
            table.findable = False
        if self.states is not None:
            self.states.reset()

    # --- the host tier ----------------------------------------------------------------------------

    def fetches(self, number: int) -> bool:
        """Whether a sequence waits for pages from the host."""
        return self.tier is not None and self.tier.waits(number)

    def land(self) -> list[int]:
        """Begins a plan: fills pages that were fetched, and saves cached pages that would be evicted next.

        Returns:
            Numbers of sequences whose fetched pages have all arrived.
        """
        if self.tier is None:
            return []
        complete = self.tier.land(self._hold_fetched)
        self.tier.save_ahead(self._pool.capacity, self._pool.available)
        return complete

    def _hold_fetched(self, fetch: Fetch) -> None:
        assert fetch.number is not None
        if self._tables[fetch.number].findable:
            self._index.hold(fetch.block, fetch.group, fetch.page)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or owned, and every holder is known."""
        self._index.check_integrity()
        if self.tier is not None:
            self.tier.check_integrity()
        if self.states is not None:
            assert self.states.numbers == self.numbers, "a sequence has no state, or a state has no sequence"
            self.states.pool.check_integrity(self.states.held())
        groups, tables = range(len(self.windows)), self._tables.values()
        held = Counter(page for table in tables for group in groups for page in table.held(group))
        self._pool.check_integrity(held)

    def _enter(self, number: int, table: BlockTable) -> None:
        """Adds a sequence as a holder of the pages in its block table."""
        self._tables[number] = table
        for group in range(len(self.windows)):
            for page in filter(None, table.held(group)):
                self._pool.share(page)
                if self.tier is not None:
                    self.tier.taken(page)
        if table.blocks:
            self._index.use(table.blocks[-1])

    def _grow(self, table: BlockTable, group: int, pages: int) -> None:
        missing = pages - len(table.pages[group])
        if missing > 0:
            table.pages[group] += self._pool.take(missing)

    def _release(self, group: int, page: int) -> None:
        pool, keep = self._pool, self._index.holds(group, page)
        pool.release(page, keep=keep)
        if self.tier is not None and keep and (self.tier.give is not None or not pool.holders(page)):
            self.tier.cached(page, self._index.block(group, page), group)

    def _forget(self, groups: range, page: int) -> None:
        """Removes an evicted page of one of these groups from its block."""
        for group in groups:
            if self._index.holds(group, page):
                if self.tier is not None:
                    self.tier.evicted(page, self._index.block(group, page), group)
                self._index.forget(group, page)
