"""Large answers are made in portions, so that the event loop serves other requests meanwhile, and as JSON
texts in parts, so that long lists are never joined.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

PORTION = 2_000  # values (log probabilities, numbers) that are converted at once, within a few ms
Parts = list[bytes]  # of a text


class LogprobPositions(Protocol):
    def __getitem__(self, part: slice, /) -> Sequence[Mapping[int, object] | None]: ...


class Portions:
    """Cuts the values of all answers into portions. Between two, the event loop runs everything that is
    ready. Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._lock, self._since = asyncio.Lock(), 0

    async def next_turn(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)

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
                await self.next_turn()
            self._since += values
            yield part


def width_of(positions: LogprobPositions) -> int:
    """Values at each of these positions with log probabilities."""
    return max((len(position) for position in positions[:2] if position), default=1)


def encoded(value: object) -> Parts:
    """A short value. Lone surrogates, which UTF-8 does not have, become question marks."""
    try:
        return [msgspec.json.encode(value)]
    except UnicodeEncodeError:
        return [json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")]


def with_members(head: Parts, members: dict[str, Parts]) -> Parts:
    """An object that is not empty, with further members."""
    out = [*head[:-1], head[-1][:-1]]
    for name, parts in members.items():
        out += [b',"%s":' % name.encode(), *parts]
    return [*out, b"}"]


def array(items: Iterable[Parts]) -> Parts:
    """An array of these texts."""
    out = [b"["]
    for item in items:
        if len(out) > 1:
            out.append(b",")
        out += item
    return [*out, b"]"]


async def long_array[T](
    portions: Portions,
    items: Sequence[T],
    width: int = 1,
    convert: Callable[[Sequence[T]], Sequence[Any]] = lambda items: items,
) -> Parts:
    """An array of the converted items; `width`: most values in an item."""
    return array([[msgspec.json.encode(convert(part))[1:-1]] async for part in portions.slices(items, width)])
