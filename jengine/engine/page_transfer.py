"""Pages that travel between an engine and stores outside of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Full, Queue, SimpleQueue
from typing import Any

import numpy as np

from jengine.core.kv_transfer import KvTransfer
from jengine.core.updates import StoreLoad
from jengine.core.weights import FIRST_VERSION, Version
from jengine.engine.page_events import PageNames, digest_of, digests, page_name, salt_of
from jengine.engine.page_stores import Stores
from jengine.execution.kv_cache import Page, leaves_of, parts_of
from jengine.execution.runner import Runner
from jengine.scheduling.pages.block_table import Block, LoraSalt, Salt
from jengine.scheduling.pages.prefix_index import first_seen
from jengine.scheduling.requests.sequence import Sequence as RequestSequence
from jengine.scheduling.scheduler import Scheduler
from jengine.stores.memory import MemoryStore, PageStore, StoreError, size_of

Place = tuple[int, int]  # index of a block, cache group


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt for whose prefix pages may be in a store.

    Attributes:
        tokens: of the blocks that a hit may have at most.
        here: for each of these blocks, whether the page of each group is on the device or on the host.
        windows: of the groups.
        grid: a hit has a multiple of this number of blocks.
    """

    salt: Salt
    tokens: Sequence[int]
    here: Sequence[Sequence[bool]]
    windows: Sequence[int | None]
    page_size: int
    grid: int

    @property
    def missing(self) -> list[Place]:
        """All pages that are not here."""
        return [
            (index, group)
            for index, groups in enumerate(self.here)
            for group, is_here in enumerate(groups)
            if not is_here
        ]

    def longest(self, there: set[Place] | frozenset[Place] = frozenset()) -> int:
        """The blocks of the longest hit of pages that are here and of these in a store."""
        best, runs = 0, [0] * len(self.windows)  # number of consecutive blocks with a page, up to here
        for index, groups in enumerate(self.here):
            for group, is_here in enumerate(groups):
                runs[group] = runs[group] + 1 if is_here or (index, group) in there else 0
            blocks = index + 1
            needed = [blocks - self._first(group, blocks) for group in range(len(runs))]
            if blocks % self.grid == 0 and all(run >= need for run, need in zip(runs, needed, strict=True)):
                best = blocks
        return best

    def needed(self, blocks: int) -> list[Place]:
        """The pages that a hit of so many blocks needs and that are not here, the first blocks first."""
        return [
            (index, group)
            for index, groups in enumerate(self.here[:blocks])
            for group, is_here in enumerate(groups)
            if not is_here and index >= self._first(group, blocks)
        ]

    def _first(self, group: int, blocks: int) -> int:
        return first_seen(self.windows[group], blocks * self.page_size, self.page_size)


log = logging.getLogger(__name__)
MOST_WAITING = 512  # pages that wait to be kept; more are dropped, so that a slow store delays nothing
LOADERS = 4  # threads
POLL_SECONDS = 0.002
LEAST_WAIT = 0.25  # seconds; beyond these, a prompt does not wait longer than computing it would take
CLOSE_SECONDS = 5.0  # for keeping what is waiting
FIRST_RATE, GAIN, FORGET = 1e-3, 0.2, 0.95  # of the seconds that a page takes


@dataclass(eq=False, slots=True)
class _Load:
    """Pages of a prompt that are being loaded.

    Attributes:
        numbers: of the prompt's sequences.
        until: when they stop waiting, on `time.monotonic`.
        worth: seconds that computing the tokens of all its blocks would take.
        pages: those that have come.
        over: whether no more will come.
    """

    numbers: list[int]
    store: PageStore
    space: bytes
    lookup: Lookup
    until: float
    worth: float
    pages: SimpleQueue[tuple[Place, Sequence[np.ndarray]]] = field(default_factory=SimpleQueue)
    over: bool = False


class PageTransfer:
    """Gives an engine's pages to a store, and loads pages of prompts from one into host memory, where prompts
    find them as if they had been evicted from the device. A prompt waits for its pages a bounded time;
    whatever is missing then is computed.

    Pages of sequences with LoRA adapters stay in the engine: adapters have no names that others know.

    `came`, `settle` and `wait` are called by the engine's thread. Stores are used in other threads.

    Args:
        version: that of the weights.
        like: the form of a page.
    """

    def __init__(
        self,
        config: KvTransfer,
        stores: Stores,
        names: PageNames,
        scheduler: Scheduler,
        runner: Runner,
        version: Callable[[], Version],
        like: Any,
    ) -> None:
        self._config, self._stores, self._names, self._like = config, stores, names, like
        self._scheduler, self._blocks, self._runner = scheduler, scheduler.blocks, runner
        self._version, self._space = version, names.space()
        self._spaced: Version = FIRST_VERSION
        assert self._blocks.tier is not None, "pages pass through host memory"
        self._tier = self._blocks.tier
        self._loads: list[_Load] = []
        self._news, self._closed = threading.Event(), False
        self._queue: Queue[tuple[bytes, Block, int, Page] | None] = Queue(MOST_WAITING)
        self._lock = threading.Lock()  # of the counts and rates
        self._counts, self._rates = StoreLoad(config.connector), dict[str | None, float]()
        self._loaders = ThreadPoolExecutor(LOADERS, "page-loader") if config.loads else None
        self._keeper: threading.Thread | None = None
        self._renews = isinstance(stores.keep, MemoryStore)  # leases, by keeping a page again
        if stores.keep is not None:
            self._tier.give = self._give
            if isinstance(stores.keep, MemoryStore):
                stores.keep.coming = self.coming
            self._keeper = threading.Thread(target=self._keep, name="page-keeper", daemon=True)
            self._keeper.start()

    @property
    def load(self) -> StoreLoad:
        """What it has done so far. Thread-safe."""
        with self._lock:
            return self._counts

    @property
    def address(self) -> str | None:
        """host:port where it serves pages; None: it does not."""
        server = self._stores.server
        return None if server is None else f"{server.host}:{server.port}"

    @property
    def saving(self) -> bool:
        """Whether the engine must step so that pages reach the store."""
        return self._tier.saving

    def coming(self) -> bool:
        """Whether pages are on their way to the store. Thread-safe: looks in the order in which they go."""
        return self._tier.saving or self._queue.unfinished_tasks > 0

    def close(self) -> None:
        """Keeps what is waiting, for a bounded time, and ends. May be called repeatedly."""
        if self._closed:
            return
        self._closed, self._tier.give = True, None
        if self._keeper is not None:
            try:
                self._queue.put(None, timeout=CLOSE_SECONDS)
                self._keeper.join(CLOSE_SECONDS)
            except Full:
                log.warning("a store of pages is too slow: pages are lost")
        self._stores.close()
        if self._loaders is not None:
            self._loaders.shutdown(wait=True, cancel_futures=True)

    # --- from a store -------------------------------------------------------------------------

    def came(self, sequences: Sequence[RequestSequence]) -> None:
        """A prompt was queued. If pages of it may be in a store, its sequences wait for them."""
        first, size = sequences[0], self._blocks.page_size
        request = first.request
        store = self._stores.source(request.pages_from)
        whole = request.params.prompt_logprobs is not None or (
            request.pooling is not None and request.pooling.needs_all
        )
        if store is None or whole or isinstance(first.salt, LoraSalt) or self._loaders is None:
            return
        windows = self._blocks.windows
        longest = min((len(first.keys) - 1) // size, self._tier.capacity // len(windows))
        known = self._blocks.known(first.keys, first.salt)[:longest]
        known += [[False] * len(windows)] * (longest - len(known))
        tokens, grid = tuple(first.keys[: longest * size]), self._blocks.hit_grid // size
        lookup = Lookup(first.salt, tokens, known, windows, size, grid)
        if lookup.longest() == longest // grid * grid:
            return
        timeout, worth = self._config.load_timeout, float("inf")
        if request.pages_from is None:  # no other engine is known to have computed them
            worth = self._scheduler.prefixes.compute_seconds(0, len(tokens))
            timeout = min(timeout, max(worth, LEAST_WAIT))
        numbers = [sequence.number for sequence in sequences]
        load = _Load(numbers, store, self.space, lookup, time.monotonic() + timeout, worth)
        self._loaders.submit(self._load, load, request.pages_from)  # may raise
        self._scheduler.registry.incoming |= {*numbers}
        self._loads.append(load)

    def settle(self) -> None:
        """Takes pages that have come. Prompts that have theirs, or have waited long enough, may start."""
        self._news.clear()
        incoming = self._scheduler.registry.incoming
        for load in [*self._loads]:
            over = load.over  # before taking pages: none come afterwards
            self._take(load)
            waiting = not incoming.isdisjoint(load.numbers)
            if over or not waiting or time.monotonic() > load.until:
                incoming.difference_update(load.numbers)
                self._loads.remove(load)
                if not over:
                    load.until = 0.0
                    if waiting:
                        self._count(late=1)

    @property
    def waits(self) -> bool:
        """Whether pages are on their way, in either direction."""
        return bool(self._loads) or self.saving

    def wait(self) -> None:
        """Waits a moment for them."""
        self._news.wait(POLL_SECONDS)

    @property
    def space(self) -> bytes:
        """What the names of this engine's pages have in common now."""
        version = self._version()
        if version != self._spaced:
            self._spaced, self._space = version, self._names.space(version)
        return self._space

    def _take(self, load: _Load) -> None:
        pages = list[tuple[Place, Sequence[np.ndarray]]]()
        while True:
            try:
                pages.append(load.pages.get_nowait())
            except Empty:
                break
        if not pages or load.space != self.space:
            return
        lookup = load.lookup
        hosts = self._blocks.receive(lookup.tokens, lookup.salt, [place for place, _ in pages])
        for host, (_, leaves) in zip(hosts, pages, strict=True):
            if host:
                self._runner.host.put(host, leaves)

    def _load(self, load: _Load, source: str | None) -> None:
        """Runs in a thread."""
        with self._counted("so prompts are computed"):
            self._load_from(load, source)
        load.over = True
        self._news.set()

    def _load_from(self, load: _Load, source: str | None) -> None:
        lookup = load.lookup
        left = load.until - time.monotonic()
        if left <= 0.0 or self._closed:
            return
        blocks = [*digests(lookup.salt, lookup.tokens, lookup.page_size)]
        missing = lookup.missing
        names = [page_name(load.space, blocks[index], group) for index, group in missing]
        there = load.store.find(names, left if source is not None else 0.0)
        stored = {place for place, is_there in zip(missing, there, strict=True) if is_there}
        had, longest = lookup.longest(), lookup.longest(stored)
        wanted = lookup.needed(longest) if longest > had else []
        self._count(queries=len(lookup.needed(len(blocks))))
        worth = load.worth * (longest - had) / max(len(blocks), 1)
        if not wanted or self._too_slow(source, len(wanted), worth):
            return
        by_place = dict(zip(missing, names, strict=True))
        begun, came, size = time.monotonic(), 0, 0
        pages = load.store.load([by_place[place] for place in wanted])
        for data, place in zip(pages, wanted, strict=True):
            leaves = None if data is None else leaves_of(data, self._like)
            if data is None or leaves is None or time.monotonic() > load.until:
                break  # the following ones would not be found
            load.pages.put((place, leaves))
            came, size = came + 1, size + len(data)
            self._news.set()
        seconds = (time.monotonic() - begun) / max(came, 1)
        with self._lock:
            rate = self._rates.get(source, FIRST_RATE)
            self._rates[source] = rate + GAIN * (seconds - rate)
        self._count(hits=came, loaded_bytes=size, loading_seconds=time.monotonic() - begun)

    def _too_slow(self, source: str | None, pages: int, worth: float) -> bool:
        """Whether computing the pages' tokens is predicted to be faster than loading them."""
        with self._lock:
            rate = self._rates.get(source, FIRST_RATE)
            slow = pages * rate > worth
            if slow:
                self._rates[source] = rate * FORGET  # so that it is tried again
        if slow:
            self._count(declined=pages)
        return slow

    # --- to a store ---------------------------------------------------------------------------

    def _give(self, host: int, block: Block, group: int, again: bool) -> None:
        """The tier keeps a page, which others may need. New pages come before those that are given again."""
        if again and not self._renews and self._queue.qsize() > MOST_WAITING // 2:
            return
        try:
            self._queue.put_nowait((self.space, block, group, self._runner.host.page(host)))
        except Full:
            self._count(dropped=1)

    def _keep(self) -> None:
        """Runs in a thread until None is queued."""
        assert self._stores.keep is not None
        while (first := self._queue.get()) is not None:
            with self._counted("so a page is not kept"):
                self._keep_one(self._stores.keep, *first)
            self._queue.task_done()

    def _keep_one(self, store: PageStore, space: bytes, block: Block, group: int, page: Page) -> None:
        if isinstance(salt_of(block), LoraSalt):
            return
        name = page_name(space, digest_of(block), group)
        known = store.find([name])[0]
        if known and not self._renews:
            return
        parts = parts_of(page)
        if not store.keep(name, parts):
            self._count(dropped=1)
        elif not known:
            self._count(kept=1, kept_bytes=size_of(parts))

    @contextlib.contextmanager
    def _counted(self, consequence: str) -> Iterator[None]:
        """Counts and logs a failure of a store. The thread goes on."""
        try:
            yield
        except (StoreError, OSError) as error:
            self._count(failures=1)
            log.warning("a store of pages failed, %s: %s", consequence, error)
        except Exception:
            self._count(failures=1)
            log.exception("pages cannot travel, %s", consequence)

    def _count(self, **more: float) -> None:
        with self._lock:
            counts = self._counts
            self._counts = counts._replace(**{name: getattr(counts, name) + n for name, n in more.items()})
