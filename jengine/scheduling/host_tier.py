"""The prefix cache's second tier: pages of the host's memory, for blocks whose pages on the device are about to be evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jengine.scheduling.prefix_index import Block, PrefixIndex
from jengine.scheduling.step_plan import Swaps
from jengine.table.pages import SWAPS

SAVED_SHARE = 4  # one in this many pages of a pool is kept free or saved, so that taking it loses nothing


@dataclass(slots=True, eq=False)
class Fetch:
    """A host page on its way into a page of a sequence.

    Attributes:
        number: the sequence's; None once that has released its pages.
        place: where it is staged on the device; 0 until it is under way.
    """

    number: int | None
    block: Block
    group: int
    pool: int
    host: int
    page: int
    place: int = 0


class HostTier:
    """Host pages by the block and cache group whose keys and values they hold. A copy to the host is a *spill*, one back a *fetch*.
    Both take a while: a block cannot be found here before its spill has ended.

    A host page is free; *arriving*, while its spill is under way; or *kept*: it can be found, and the least recently used is evicted for
    another. A kept page that is being fetched is *pinned*. A page that was forgotten meanwhile is free when its copy has ended.

    Cached pages that would be evicted next are spilled ahead; what is evicted before its turn is spilled then, as far as there is room.

    Args:
        pages: of the host.
        staged: pages that may be under way at once, in each direction.
        index: of the blocks. A copy on the host is one more user of its block, which so stays known.
        pools: how many pools of the device there are.

    Attributes:
        spilled, fetched: pages copied.
        evictions: kept pages that were given to other blocks.
    """

    def __init__(self, pages: int, staged: int, index: PrefixIndex, pools: int) -> None:
        self.capacity, self.staged = pages, staged
        self.spilled = self.fetched = self.evictions = 0
        self._index = index
        self._free: list[int] = [*range(pages, 0, -1)]
        self._page: dict[tuple[Block, int], int] = {}  # by block and group
        self._owner: dict[int, tuple[Block, int]] = {}  # the reverse
        self._arriving: set[int] = set()
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._pins: Counter[int] = Counter()
        self._landed_pins: list[int] = []  # of fetches that the last plan put into their pages
        self._unsaved: list[OrderedDict[int, tuple[Block, int]]] = [OrderedDict() for _ in range(pools)]  # cached pages without a copy
        self._queue: deque[Fetch] = deque()
        self._places = [*range(staged, 0, -1)]
        self._under_way: dict[int, Fetch] = {}  # by place
        self._landed: list[Fetch] = []
        self._missing: Counter[int] = Counter()  # fetches that a sequence still waits for
        self._wanted: Counter[tuple[Block, int]] = Counter()  # the same, by block and group
        self._swaps = Swaps()

    @property
    def used(self) -> int:
        """Host pages that are not free."""
        return self.capacity - len(self._free)

    def find(self, block: Block, group: int) -> int:
        """The host page that holds a block's keys and values of a group; 0 where there is none, or its spill has not ended."""
        page = self._page.get((block, group), 0)
        return page if page in self._kept else 0

    # --- to the host ------------------------------------------------------------------------------

    def cached(self, pool: int, page: int, block: Block, group: int) -> None:
        """A page of the device has no holder any more, and can be found."""
        if (block, group) not in self._page:
            self._unsaved[pool][page] = block, group

    def taken(self, pool: int, page: int) -> None:
        """A cached page has a holder again."""
        self._unsaved[pool].pop(page, None)

    def evicted(self, pool: int, page: int, block: Block, group: int) -> None:
        """A cached page is about to be overwritten, in the step that is being planned."""
        self._unsaved[pool].pop(page, None)
        host = self._page.get((block, group))
        if host is None:
            self._spill(pool, page, block, group)
        elif host in self._kept:
            self._kept.move_to_end(host)

    def save_ahead(self, pool: int, capacity: int, available: int) -> None:
        """Spills the cached pages that would be evicted next, a few in each step, where too few can be taken without a loss."""
        unsaved = self._unsaved[pool]
        lacking = capacity // SAVED_SHARE - (available - len(unsaved))
        for _ in range(min(lacking, len(unsaved), SWAPS)):
            page, (block, group) = next(iter(unsaved.items()))
            if not self._spill(pool, page, block, group):
                return
            del unsaved[page]

    def _spill(self, pool: int, page: int, block: Block, group: int) -> bool:
        """False: there is no room."""
        host = self._take() if len(self._arriving) < self.staged else 0
        if not host:
            return False
        self._arriving.add(host)
        self._page[block, group], self._owner[host] = host, (block, group)
        self._index.use(block)
        self._swaps.spills.append((pool, page, host))
        self.spilled += 1
        return True

    def _take(self) -> int:
        """A free host page, or the least recently used of those kept; 0 where all are arriving or pinned."""
        if self._free:
            return self._free.pop()
        host = next((page for page in self._kept if page not in self._pins), 0)
        if host:
            self.evictions += 1
            del self._kept[host]
            self._disown(host)
        return host

    def _disown(self, host: int) -> None:
        block, group = self._owner.pop(host)
        del self._page[block, group]
        self._index.version += 1
        self._index.unuse(block)

    def saved(self, hosts: Iterable[int]) -> None:
        """The spills into these host pages have ended."""
        for host in hosts:
            self._arriving.remove(host)
            if host in self._owner:
                self._kept[host] = None
                self._index.version += 1
            else:
                self._free.append(host)

    # --- and back ---------------------------------------------------------------------------------

    def pin(self, block: Block, group: int) -> int:
        """Keeps a host page, which `find` has found, until its fetch has ended."""
        host = self._page[block, group]
        self._pins[host] += 1
        self._kept.move_to_end(host)
        return host

    def coming(self, block: Block, group: int) -> bool:
        """Whether a sequence waits for its page."""
        return (block, group) in self._wanted

    def _unpin(self, host: int) -> None:
        self._pins[host] -= 1
        if not self._pins[host]:
            del self._pins[host]
            if host not in self._owner:
                self._free.append(host)

    def fetch(self, fetch: Fetch) -> None:
        """A pinned page is to be brought into a page of the device."""
        assert fetch.number is not None
        self._missing[fetch.number] += 1
        self._wanted[fetch.block, fetch.group] += 1
        self._queue.append(fetch)

    def waits(self, number: int) -> bool:
        """Whether a sequence waits for pages."""
        return number in self._missing

    @property
    def fetching(self) -> bool:
        """Whether any does."""
        return bool(self._missing)

    def start(self) -> None:
        """Starts fetches, as far as there are places to stage them."""
        while self._queue and self._places:
            fetch = self._queue.popleft()
            fetch.place = self._places.pop()
            self._under_way[fetch.place] = fetch
            self._swaps.fetches.append((fetch.host, fetch.place))

    def landed(self, places: Iterable[int]) -> None:
        """What was to be staged in these places is there."""
        self._landed += [self._under_way.pop(place) for place in places]

    def land(self, hold: Callable[[Fetch], None]) -> list[int]:
        """Puts what is staged into its pages, before the trunk of the step that is being planned.

        Host pages stay pinned until the next plan: what this one puts into a page, it must not spill from there.

        Args:
            hold: lets a page be found.

        Returns:
            Numbers of sequences that now have all of their pages.
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
            self._swaps.fills.append((fetch.pool, fetch.place, fetch.page))
            hold(fetch)
            self._unwant(fetch)
            self._missing[number] -= 1
            if not self._missing[number]:
                del self._missing[number]
                complete.append(number)
        self._landed = []
        return complete

    def cancel(self, number: int) -> None:
        """A sequence releases its pages, whether or not they have come."""
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

    # --- all --------------------------------------------------------------------------------------

    @property
    def planned(self) -> tuple[int, int]:
        """Spills and fills that were not taken yet."""
        return len(self._swaps.spills), len(self._swaps.fills)

    def take_swaps(self) -> Swaps:
        """What was planned since the last call."""
        self.start()
        swaps, self._swaps = self._swaps, Swaps()
        return swaps

    def reset(self) -> None:
        """Forgets all blocks; the index has forgotten them already."""
        for unsaved in self._unsaved:
            unsaved.clear()
        for host in [*self._owner]:
            self._disown(host)
        self._free += [host for host in self._kept if host not in self._pins]
        self._kept.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every host page and place is where it belongs, once."""
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
        assert Counter((fetch.block, fetch.group) for fetch in wanted) == self._wanted, "a fetch is miscounted"
        places = sorted([*self._places, *self._under_way, *(fetch.place for fetch in self._landed)])
        assert places == [*range(1, self.staged + 1)], "a place is lost or shared"
