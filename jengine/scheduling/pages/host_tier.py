"""The host tier of the prefix cache: host memory for blocks whose device pages are about to be evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jengine.scheduling.pages.block_table import HOST, TOKENS, Block, PageChange
from jengine.scheduling.pages.prefix_index import PrefixIndex
from jengine.scheduling.step_plan import Swaps
from jengine.table.program_table import SWAPS

# one in this many pages of a pool is kept free or saved, so that it can be reused without losing data
SAVED_SHARE = 4


@dataclass(slots=True, eq=False)
class Fetch:
    """A host page that is being copied into a page of a sequence.

    Attributes:
        number: the sequence's number; None once it has released its pages.
        place: staging place on the device; 0 before the copy starts.
    """

    number: int | None
    block: Block
    group: int
    host: int
    page: int
    place: int = 0


class HostTier:
    """Host pages by the block and cache group whose keys and values they hold.

    A copy to the host is a *spill*, a copy back a *fetch*. Both are asynchronous: a block cannot be found
    here before its spill has finished.

    A host page is *free*, *arriving* (its spill is in flight) or *kept* (it can be found). The least recently
    used kept page is evicted when another block needs its place. A kept page that is being fetched is
    *pinned*. A page that is forgotten during its copy becomes free when the copy has finished.

    Cached pages that would be evicted next are spilled ahead of time. A page that is evicted before that is
    spilled at that moment, if there is room. If `give` is set, every page is spilled soon after a sequence
    has released it.

    A page may also come from a store outside the engine (`receive`).

    Args:
        pages: number of host pages.
        staged: maximum number of pages in flight, in each direction.
        index: the blocks. A copy on the host counts as a user of its block, so the index keeps the block.

    Attributes:
        spilled, fetched: numbers of pages copied.
        evictions: number of kept pages that were reused for other blocks.
        planned: swaps that are not yet taken.
        give: passes kept pages on to a store: called with the host page, the block, the group and False when
            a spill has finished, and with True when a sequence releases a block with a kept page, which the
            store may have lost. None: there is no store.
    """

    def __init__(self, pages: int, staged: int, index: PrefixIndex) -> None:
        self.capacity, self.staged = pages, staged
        self.spilled = self.fetched = self.evictions = 0
        self.give: Callable[[int, Block, int, bool], object] | None = None
        self._index = index
        self._free: list[int] = [*range(pages, 0, -1)]
        self._page: dict[tuple[Block, int], int] = {}  # by block and group
        self._owner: dict[int, tuple[Block, int]] = {}  # the reverse
        self._arriving: set[int] = set()
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pins: Counter[int] = Counter()
        self._landed_pins: list[int] = []  # of fetches that the last plan moved into their pages
        # cached pages without a copy
        self._unsaved: OrderedDict[int, tuple[Block, int]] = OrderedDict()
        self._queue: deque[Fetch] = deque()
        self._places = [*range(staged, 0, -1)]
        self._under_way: dict[int, Fetch] = {}  # by staging place
        self._landed: list[Fetch] = []
        self._missing: Counter[int] = Counter()  # number of fetches that a sequence still waits for
        self._wanted: Counter[tuple[Block, int]] = Counter()  # the same, by block and group
        self.planned = Swaps()

    @property
    def used(self) -> int:
        """Number of host pages that are not free."""
        return self.capacity - len(self._free)

    def find(self, block: Block, group: int) -> int:
        """The host page of a block and group; 0 if there is none or its spill has not finished."""
        page = self._page.get((block, group), 0)
        return page if page in self._kept else 0

    # --- to the host ------------------------------------------------------------------------------

    def cached(self, page: int, block: Block, group: int) -> None:
        """A device page that can be found lost a holder: its last one, unless `give` is set."""
        host = self._page.get((block, group))
        if host is None:
            self._unsaved[page] = block, group
        elif self.give is not None and host in self._kept:
            self.give(host, block, group, True)

    def taken(self, page: int) -> None:
        """A cached page got a holder again."""
        if self.give is None:
            self._unsaved.pop(page, None)

    def evicted(self, page: int, block: Block, group: int) -> None:
        """A cached page will be overwritten in the step that is being planned."""
        host = self._page.get((block, group))
        if host is None:
            self._spill(page, block, group)
        elif host in self._kept:
            self._kept.move_to_end(host)
        self._unsaved.pop(page, None)

    def save_ahead(self, capacity: int, available: int) -> None:
        """If too few pages can be reused without losing data, spills the pages that would be evicted next, a
        few per step."""
        unsaved = self._unsaved
        lacking = len(unsaved)
        if self.give is None:
            lacking = capacity // SAVED_SHARE - (available - len(unsaved))
        for _ in range(min(lacking, len(unsaved), SWAPS)):
            page, (block, group) = next(iter(unsaved.items()))
            if not self._spill(page, block, group):
                return
            del unsaved[page]

    def _spill(self, page: int, block: Block, group: int) -> bool:
        """Returns False if there is no room."""
        host = self._take() if len(self._arriving) < self.staged else 0
        if not host:
            return False
        self._arriving.add(host)
        self._page[block, group], self._owner[host] = host, (block, group)
        self._index.use(block)
        self.planned.spills.append((TOKENS, page, host))
        self.spilled += 1
        return True

    def _take(self) -> int:
        """A free host page, or the least recently used kept one; 0 if all are arriving or pinned."""
        if self._free:
            return self._free.pop()
        host = next((page for page in self._kept if page not in self._pins), 0)
        if host:
            self.evictions += 1
            del self._kept[host]
            if self._index.changed is not None:
                self._index.changed(PageChange("removed", *self._owner[host], HOST))
            self._disown(host)
        return host

    def _disown(self, host: int) -> None:
        block, group = self._owner.pop(host)
        del self._page[block, group]
        self._index.version += 1
        self._index.unuse(block)

    def saved(self, hosts: Iterable[int]) -> None:
        """The spills into these host pages have finished."""
        for host in hosts:
            if host in self._owner:
                self._keep(host)
                if self.give is not None:  # while it is `saving`
                    self.give(host, *self._owner[host], False)
            else:
                self._free.append(host)
            self._arriving.remove(host)

    @property
    def saving(self) -> bool:
        """Whether pages are still to be given to a store. Thread-safe: none that waited is missed."""
        return self.give is not None and bool(self._unsaved or self._arriving)

    def _keep(self, host: int) -> None:
        self._kept[host] = None
        self._index.version += 1
        if self._index.changed is not None:
            self._index.changed(PageChange("stored", *self._owner[host], HOST))

    def receive(self, block: Block, group: int) -> int:
        """The host page for a store's page of a block; 0 if there is none, or the page is here already."""
        host = 0 if block.pages[group] or (block, group) in self._page else self._take()
        if host:
            self._page[block, group], self._owner[host] = host, (block, group)
            self._index.use(block)
            self._keep(host)
        return host

    # --- to the device ---------------------------------------------------------------------------------

    def pin(self, block: Block, group: int) -> int:
        """Pins a host page returned by `find` until its fetch has finished."""
        host = self._page[block, group]
        self._pins[host] += 1
        self._kept.move_to_end(host)
        return host

    def coming(self, block: Block, group: int) -> bool:
        """Whether a sequence is waiting for this page."""
        return (block, group) in self._wanted

    def _unpin(self, host: int) -> None:
        self._pins[host] -= 1
        if not self._pins[host]:
            del self._pins[host]
            if host not in self._owner:
                self._free.append(host)

    def fetch(self, fetch: Fetch) -> None:
        """Queues the copy of a pinned page to a device page."""
        assert fetch.number is not None
        self._missing[fetch.number] += 1
        self._wanted[fetch.block, fetch.group] += 1
        self._queue.append(fetch)

    def waits(self, number: int) -> bool:
        """Whether this sequence is waiting for pages."""
        return number in self._missing

    @property
    def fetching(self) -> bool:
        """Whether any sequence is waiting for pages."""
        return bool(self._missing)

    def landed(self, places: Iterable[int]) -> None:
        """The pages of these staging places have arrived."""
        self._landed += [self._under_way.pop(place) for place in places]

    def land(self, hold: Callable[[Fetch], None]) -> list[int]:
        """Moves staged pages into the cache, before the trunk of the step that is being planned.

        Host pages stay pinned until the next plan, since this plan must not spill a page that it fills.

        Args:
            hold: makes a page findable.

        Returns:
            Numbers of sequences whose pages have now all arrived.
        """
        for host in self._landed_pins:
            self._unpin(host)
        self._landed_pins, complete = [], []
        for fetch in self._landed:
            self._places.append(fetch.place)
            self._landed_pins.append(fetch.host)
            number = fetch.number
            if number is None:
                continue
            self.fetched += 1
            self.planned.fills.append((TOKENS, fetch.place, fetch.page))
            hold(fetch)
            self._unwant(fetch)
            self._missing[number] -= 1
            if not self._missing[number]:
                del self._missing[number]
                complete.append(number)
        self._landed = []
        return complete

    def cancel(self, number: int) -> None:
        """A sequence releases its pages, even if they have not arrived."""
        if self._missing.pop(number, None) is None:
            return
        for fetch in [*self._queue, *self._under_way.values(), *self._landed]:
            if fetch.number == number:
                fetch.number = None
                self._unwant(fetch)
                if not fetch.place:
                    self._unpin(fetch.host)
        self._queue = deque(fetch for fetch in self._queue if fetch.number is not None)

    def _unwant(self, fetch: Fetch) -> None:
        key = fetch.block, fetch.group
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]

    def take_swaps(self) -> Swaps:
        """Returns the swaps planned since the last call. Starts fetches while staging places are free."""
        while self._queue and self._places:
            fetch = self._queue.popleft()
            fetch.place = self._places.pop()
            self._under_way[fetch.place] = fetch
            self.planned.fetches.append((fetch.host, fetch.place))
        swaps, self.planned = self.planned, Swaps()
        return swaps

    def reset(self) -> None:
        """Forgets all blocks, which the index has already forgotten."""
        self._unsaved.clear()
        for host in [*self._owner]:
            self._disown(host)
        self._free += [host for host in self._kept if host not in self._pins]
        self._kept.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every host page and every place has exactly one state."""
        pinned = {host for host in self._pins if host not in self._owner}
        every = sorted([*self._free, *self._arriving, *self._kept, *pinned])
        assert every == [*range(1, self.capacity + 1)], f"host pages are lost or doubled: {every}"
        assert {host: key for key, host in self._page.items()} == self._owner, "a host page of two blocks"
        assert {*self._kept} <= {*self._owner}, "a host page is kept for no block"
        fetches = [*self._queue, *self._under_way.values(), *self._landed]
        pins = Counter([fetch.host for fetch in fetches] + self._landed_pins)
        assert pins == self._pins, "pins are miscounted"
        wanted = [fetch for fetch in fetches if fetch.number is not None]
        assert Counter(fetch.number for fetch in wanted) == self._missing, "a fetch is lost"
        assert Counter((fetch.block, fetch.group) for fetch in wanted) == self._wanted, (
            "a fetch is miscounted"
        )
        places = sorted([*self._places, *self._under_way, *(fetch.place for fetch in self._landed)])
        assert places == [*range(1, self.staged + 1)], "a place is lost or shared"
