"""Owners of pages: block tables of running sequences, which share pages of equal prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile

from jengine.scheduling.pages.block_table import (
    NO_HIT,
    Block,
    BlockTable,
    Changed,
    Copy,
    Entry,
    GroupPages,
    Hit,
    PagePool,
    Ranges,
    Salt,
)
from jengine.scheduling.pages.host_tier import Fetch, HostTier
from jengine.scheduling.pages.prefix_index import LAST_PAGE, PrefixFinder, PrefixIndex
from jengine.scheduling.pages.states import States
from jengine.table.program_table import SWAPS, most_pages, pages_of


class BlockManager:
    """Block tables by sequence number, over one or more pools of pages.

    Sequences whose tokens are equal up to the end of a page share that page. Only its single holder may write
    to a page. A page can be found once all of its tokens are known and their step is planned: steps run in
    the order in which they are planned, and each layer writes keys and values before it reads any.

    Args:
        page_size: tokens in a page.
        pools: number of pages in each pool, the null page included.
        groups: the model's cache groups with block tables.
        states: whether the model also has recurrent states. They form one more group, in the last pool.
        draft_states: number of these for drafts.
        prefix_caching: whether released pages are kept for later requests.
        hit_grid: hits are multiples of this number of tokens, which is a multiple of the page size; None: the
            page size.
        generated: whether recurrent states of generated tokens are kept for later requests.
        host_pages: pages in the host tier, which needs prefix_caching; 0: no host tier.
        staged: maximum number of pages in flight between device and host, in each direction.

    Attributes:
        tier: the host tier.
        states: the recurrent states, if the model has them.
    """

    def __init__(
        self,
        page_size: int,
        pools: Sequence[int],
        groups: Sequence[GroupPages] = (GroupPages(),),
        *,
        states: bool = False,
        draft_states: int = 0,
        prefix_caching: bool = False,
        hit_grid: int | None = None,
        generated: bool = True,
        host_pages: int = 0,
        staged: int = SWAPS,
    ) -> None:
        self.page_size, self.groups, self.prefix_caching = page_size, tuple(groups), prefix_caching
        self.hit_grid = hit_grid or page_size
        self.pools = [PagePool(pages, partial(self._forget, pool)) for pool, pages in enumerate(pools)]
        self._pool_of = [self.pools[group.pool] for group in self.groups]
        self._groups_of = Counter(group.pool for group in self.groups)
        windows = [group.window for group in self.groups] + [LAST_PAGE] * states
        names = [group.name for group in self.groups] + ["state"] * states
        self.hit_pages = dict.fromkeys(names, 0)  # pages found, by group name
        self._windowed = [i for i, group in enumerate(self.groups) if group.window is not None]
        self._index = PrefixIndex(len(windows), page_size)
        self._finder = PrefixFinder(self._index, page_size, self.hit_grid, windows)
        arguments = self.pools[-1], self._index, len(self.groups), page_size, self.commit
        self.states = States(*arguments, draft_states, generated=generated) if states else None
        self._token_pools = self.pools[: len(self.pools) - states]
        self._tables: dict[int, BlockTable] = {}
        self.tier = (
            HostTier(host_pages, min(staged, host_pages), self._index, len(pools)) if host_pages else None
        )

    # --- pages ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of pages for tokens, over all pools, as in the counts below; none of states."""
        return sum(pool.capacity for pool in self._token_pools)

    @property
    def owned(self) -> int:
        return sum(pool.owned for pool in self._token_pools)

    @property
    def cached(self) -> int:
        """Number of pages that no sequence holds but that can be found."""
        return sum(pool.cached for pool in self._token_pools)

    @property
    def evictions(self) -> int:
        """Number of cached pages that were reused for other tokens."""
        return sum(pool.evictions for pool in self._token_pools)

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
        return 0 if table is None else sum(len(table.held(group)) for group in range(len(self.groups)))

    def new_pages(self, count: int) -> Counter[int]:
        """Pages needed from each pool when `count` sequences enter a new page in each group."""
        return Counter({pool: count * groups for pool, groups in self._groups_of.items()})

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
        blocks = self._finder.longest(tokens, salt, whole=whole)
        return Hit(blocks, len(blocks) * self.page_size)

    def match_both(self, tokens: Sequence[int], salt: Salt, hit: Hit, whole: Ranges = ()) -> Hit:
        """The longest prefix on device and host together, if longer than `hit`, on the device alone."""
        if self.tier is None:
            return hit
        blocks = self._finder.longest(tokens, salt, self.tier.find, whole)
        length = len(blocks) * self.page_size
        return (
            Hit(blocks, length, len(self._finder.missing(blocks)), length - hit.tokens)
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
        return any(tier.coming(hit.blocks[index], group) for group, index in self._finder.missing(hit.blocks))

    def needed(self, hit: Hit, tokens: int, ahead: int) -> Counter[int]:
        """Pages needed from each pool to admit a sequence. Pages of the hit that other sequences own cost
        nothing.

        Args:
            tokens: number of known tokens. Groups without a window get pages for all of them at once, the
                others as they are computed.
            ahead: minimum number of tokens computed at a time.
        """
        wanted: Counter[int] = Counter()
        for group, (window, pool) in enumerate(self.groups):
            first, holders = self._finder.first_seen(group, hit.tokens), self.pools[pool].holders
            shared = sum(holders(block.pages[group]) > 0 for block in hit.blocks[first:])
            limit = most_pages(tokens, window, self.page_size, ahead)
            wanted[pool] += max(min(self.pages_of(tokens) - first, limit) - shared, 0)
        if self.states is not None:
            wanted[len(self.pools) - 1] += self.states.needed(hit.blocks)
        return wanted

    @property
    def forked(self) -> Counter[int]:
        """Pages needed from each pool for one more sample of a prompt."""
        return Counter() if self.states is None else Counter({len(self.pools) - 1: 2})

    def admit(self, number: int, hit: Hit, tokens: int, salt: Salt, known: Sequence[int] = ()) -> None:
        """Creates a sequence's block table: the pages of the hit and, for groups without a window, pages for
        all known tokens.

        Args:
            known: the known tokens, for a model with recurrent states.

        Pages of the hit that are on the host are fetched. The sequence waits until they have arrived (see
        `land`).
        """
        firsts = [self._finder.first_seen(group, hit.tokens) for group in range(len(self.groups))]
        pages = [
            [0] * first + [block.pages[group] for block in hit.blocks[first:]]
            for group, first in enumerate(firsts)
        ]
        table = BlockTable(pages, firsts, [*firsts], salt, self.prefix_caching, [*hit.blocks])
        self._enter(number, table)  # first: taking pages could evict those of the hit
        if self.states is not None:
            branch = self._finder.branch(known, salt) if self.prefix_caching else 0
            self.states.admit(number, hit.blocks, branch, findable=self.prefix_caching)
            self.hit_pages["state"] += bool(hit.blocks)
        for group, first in enumerate(firsts):
            self.hit_pages[self.groups[group].name] += len(hit.blocks) - first
        if self.tier is not None and hit.fetches:
            self._fetch(self.tier, number, table)
        for group, (window, _) in enumerate(self.groups):
            if window is None:
                self._grow(table, group, self.pages_of(tokens))

    def _fetch(self, tier: HostTier, number: int, table: BlockTable) -> None:
        """Allocates pages for blocks that are only on the host, and fetches them, the last first."""
        missing = self._finder.missing(table.blocks)
        # pin all first: taking pages could evict them too
        hosts = [tier.pin(table.blocks[index], group) for group, index in missing]
        for (group, index), host in zip(missing, hosts, strict=True):
            (page,) = self._pool_of[group].take(1)
            table.pages[group][index] = page
            self.hit_pages[self.groups[group].name] -= 1
            tier.fetch(Fetch(number, table.blocks[index], group, self.groups[group].pool, host, page))

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
                first = min(self._finder.first_seen(group, position), len(table.pages[group]))
                for index in range(table.first[group], first):
                    self._release(group, table.pages[group][index])
                    table.pages[group][index] = 0
                table.first[group] = max(first, table.first[group])

    def room(self, number: int, end: int) -> int:
        """Number of a sequence's tokens, up to `end`, that have pages or can get them."""
        table, pages = self._tables[number], self.pages_of(end)
        while True:
            missing: Counter[int] = Counter()
            for group, (_, pool) in enumerate(self.groups):
                missing[pool] += max(pages - len(table.pages[group]), 0)
            if self.available(missing):
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
        """Pages needed from each pool to `unshare` these sequences at these positions, in turn."""
        wanted: Counter[int] = Counter()
        holders: dict[tuple[int, int], int] = {}
        for number, position in writers:
            table, index = self._tables[number], position // self.page_size
            for group, (_, pool) in enumerate(self.groups):
                if index < len(table.pages[group]):
                    page = pool, table.pages[group][index]
                    left = holders.setdefault(page, self.pools[pool].holders(page[1]))
                    wanted[pool] += left > 1
                    holders[page] = left - 1
        return wanted

    def unshare(self, number: int, position: int) -> tuple[list[Copy], list[Entry]]:
        """Copies the page of this position if others share it, so that the sequence may write to it."""
        table, index = self._tables[number], position // self.page_size
        copies, entries = [], []
        for group, (_, pool) in enumerate(self.groups):
            if (
                index < len(table.pages[group])
                and self.pools[pool].holders(source := table.pages[group][index]) > 1
            ):
                (target,) = self.pools[pool].take(1)
                self._release(group, source)
                table.pages[group][index] = target
                copies.append(Copy(pool, source, target))
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
        for number, pool in enumerate(self.pools):
            self.tier.save_ahead(number, pool.capacity, pool.available)
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
        for number, pool in enumerate(self._token_pools):
            groups = [group for group, kind in enumerate(self.groups) if kind.pool == number]
            pool.check_integrity(
                Counter(
                    page for table in self._tables.values() for group in groups for page in table.held(group)
                )
            )

    def _enter(self, number: int, table: BlockTable) -> None:
        """Adds a sequence as a holder of the pages in its block table."""
        self._tables[number] = table
        for group, pool in enumerate(self._pool_of):
            for page in filter(None, table.held(group)):
                pool.share(page)
                if self.tier is not None:
                    self.tier.taken(self.groups[group].pool, page)
        if table.blocks:
            self._index.use(table.blocks[-1])

    def _grow(self, table: BlockTable, group: int, pages: int) -> None:
        missing = pages - len(table.pages[group])
        if missing > 0:
            table.pages[group] += self._pool_of[group].take(missing)

    def _release(self, group: int, page: int) -> None:
        pool, keep = self._pool_of[group], self._index.holds(group, page)
        pool.release(page, keep=keep)
        if self.tier is not None and keep and (self.tier.give is not None or not pool.holders(page)):
            self.tier.cached(self.groups[group].pool, page, self._index.block(group, page), group)

    def _forget(self, pool: int, page: int) -> None:
        """Removes an evicted page from its block."""
        pools = [group.pool for group in self.groups] + [len(self.pools) - 1] * (self.states is not None)
        for group, pool_of_group in enumerate(pools):
            if pool_of_group == pool and self._index.holds(group, page):
                if self.tier is not None:
                    self.tier.evicted(pool, page, self._index.block(group, page), group)
                self._index.forget(group, page)
