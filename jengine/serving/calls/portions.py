"""Large answers are made in portions, so that the event loop serves other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

PORTION = 2_000  # values (log probabilities, numbers) that are converted at once, within a few ms


class LogprobPositions(Protocol):
    def __getitem__(self, part: slice, /) -> Sequence[Mapping[int, object] | None]: ...


class Portions:
    """Between two portions, of whichever answers, the event loop runs everything that is ready. Belongs to
    one event loop.

    Attributes:
        turns: number of portions so far that were waited for.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.turns = 0

    def answer(self) -> Portioned:
        """For the values of one answer."""
        return Portioned(self)

    async def next_turn(self) -> None:
        async with self._lock:
            self.turns += 1
            await asyncio.sleep(0)


class Portioned:
    """The values of one answer."""

    def __init__(self, portions: Portions) -> None:
        self._portions, self._since = portions, 0

    async def slices[T](self, items: Sequence[T], width: int = 1) -> AsyncIterator[Sequence[T]]:
        """Slices to convert one after the other.

        Args:
            width: most values in an item.
        """
        size = max(PORTION // width, 1)
        for start in range(0, len(items), size):
            part = items[start : start + size]
            values = len(part) * width
            if self._since + values > PORTION:
                self._since = 0
                await self._portions.next_turn()
            self._since += values
            yield part


def width_of(positions: LogprobPositions) -> int:
    """Values at each of these positions with log probabilities."""
    return max((len(position) for position in positions[:2] if position), default=1)
