"""The kinds of programs. A new kind is a class in one of these files, and its place in these lists."""

from __future__ import annotations

from typing import Any

from jengine.execution.kinds.cache import (
    Allocate,
    AllocateCounts,
    Fill,
    FreeCache,
    MoveWeights,
    PageCopies,
    SlotUpdates,
    Spill,
    Stage,
)
from jengine.execution.kinds.inputs import AllocateLoras, AllocatePool, EncodeImages, WriteLora
from jengine.execution.kinds.kind import CallKind, DeviceCall, Key, Kind, Program
from jengine.execution.kinds.sampler import Count, Forget, Sampler
from jengine.execution.kinds.several_steps import Burst, Draft
from jengine.execution.kinds.tile_results import Pool, Score
from jengine.execution.kinds.trunk import Trunk

TRUNK, FORGET, STAGE = Trunk(), Forget(), Stage()
FREE_CACHE, MOVE_WEIGHTS = FreeCache(), MoveWeights()
# calls that a step makes before its trunk
BEFORE: tuple[Kind[Any], ...] = (Count(), SlotUpdates(), PageCopies())
AFTER: tuple[Kind[Any], ...] = (Score(), Pool())  # and after it, with results for the host
KINDS: tuple[Kind[Any], ...] = (
    Allocate(),
    AllocateCounts(),
    AllocateLoras(),
    WriteLora(),
    AllocatePool(),
    EncodeImages(),
    *BEFORE,
    Spill(),
    Fill(),
    TRUNK,
    Sampler(),
    *AFTER,
    Burst(),
    Draft(),
)

_NAMED: dict[str, CallKind[Any]] = {
    kind.name: kind for kind in (*KINDS, STAGE, FORGET, FREE_CACHE, MOVE_WEIGHTS)
}
_KEYED: dict[type, Kind[Any]] = {kind.key: kind for kind in KINDS if kind.key is not str}

__all__ = [
    "AFTER",
    "BEFORE",
    "FORGET",
    "FREE_CACHE",
    "KINDS",
    "MOVE_WEIGHTS",
    "STAGE",
    "TRUNK",
    "DeviceCall",
    "Key",
    "Kind",
    "Program",
    "call_kind",
    "kind_of",
    "named",
]


def named(name: str) -> CallKind[Any]:
    """The kind of this name. Raises KeyError if there is none."""
    return _NAMED[name]


def call_kind(key: Key) -> CallKind[Any]:
    """The kind of calls with this key. Raises KeyError if there is none."""
    return _NAMED[key] if isinstance(key, str) else _KEYED[type(key)]


def kind_of(key: Key) -> Kind[Any]:
    """The kind of the program with this key."""
    kind = call_kind(key)
    assert isinstance(kind, Kind), f"{key} has no program"
    return kind
