"""JSON texts in parts, so that long lists are encoded in portions and never joined."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from jengine.serving.calls.portions import Portioned

Parts = list[bytes]  # of a text


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
    portioned: Portioned,
    items: Sequence[T],
    width: int = 1,
    convert: Callable[[Sequence[T]], Sequence[Any]] = lambda items: items,
) -> Parts:
    """An array of the converted items; `width`: most values in an item."""
    return array(
        [[msgspec.json.encode(convert(part))[1:-1]] async for part in portioned.slices(items, width)]
    )
