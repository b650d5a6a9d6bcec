"""Simulated host memory: the contents of its pages, and copies that take time and finish in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable

from jengine.scheduling.step_plan import Swaps

Content = dict[int, Hashable]  # of a page, by offset; without what was never written


class HostMemory:
    """Copies pages as given, and rejects what could not be done rightly: no page is read before it has
    arrived, nor overwritten while it is read.

    Args:
        read, write: a page of the device, by pool and page.
    """

    def __init__(
        self, read: Callable[[int, int], Content], write: Callable[[int, int, Content], None]
    ) -> None:
        self._read, self._write = read, write
        self._pages: dict[int, Content] = {}
        self._spilling: dict[int, Content] = {}
        self._staging: dict[int, tuple[int, Content]] = {}  # by place: host page, what it held
        self._staged: dict[int, Content] = {}

    def page(self, host: int) -> Content:
        """What a page that has arrived holds."""
        return self._pages[host]

    def put(self, host: int, content: Content) -> None:
        """A page comes from elsewhere."""
        assert host not in self._spilling and host not in {host for host, _ in self._staging.values()}
        self._pages[host] = content

    def swap(self, swaps: Swaps) -> None:
        for pool, page, host in swaps.spills:
            assert host not in self._spilling and host not in {host for host, _ in self._staging.values()}, (
                "overwritten while it is copied"
            )
            self._pages.pop(host, None)
            self._spilling[host] = self._read(pool, page)
        assert len({(pool, page) for pool, _, page in swaps.fills}) == len(swaps.fills), (
            "two fills of one page"
        )
        for pool, place, page in swaps.fills:
            self._write(pool, page, self._staged.pop(place))
        for host, place in swaps.fetches:
            assert place not in self._staging, "a place is used twice"
            self._staged.pop(place, None)  # of a sequence that was gone when it came
            self._staging[place] = host, self._pages[host]

    def ended(self, draw: random.Random, share: float) -> tuple[list[int], list[int]]:
        """Some of the copies in flight finish, in any order: (host pages, places)."""
        saved, staged = (
            [one for one in under_way if draw.random() < share]
            for under_way in (self._spilling, self._staging)
        )
        for ended in (saved, staged):
            draw.shuffle(ended)
        self._pages |= {host: self._spilling.pop(host) for host in saved}
        self._staged |= {place: self._staging.pop(place)[1] for place in staged}
        return saved, staged
