"""The kinds of programs. A new kind is a class in one of these files, and its place in these lists."""

from __future__ import annotations

from typing import Any

from jengine.execution.device_state import ALLOCATE_COUNTS, ALLOCATE_LORAS, ALLOCATE_POOL, DeviceState
from jengine.execution.kinds.cache import (
    Allocate,
    Fill,
    MoveWeights,
    PageCopies,
    SlotUpdates,
    Spill,
    Stage,
)
from jengine.execution.kinds.inputs import EncodeImages, WriteLora
from jengine.execution.kinds.kind import Allocation, CallKind, Freeing
from jengine.execution.kinds.kind import DeviceCall as DeviceCall
from jengine.execution.kinds.kind import Key as Key
from jengine.execution.kinds.kind import Kind as Kind
from jengine.execution.kinds.sampler import Count, Sampler
from jengine.execution.kinds.several_steps import Burst, Draft
from jengine.execution.kinds.tile_results import Pool, Score
from jengine.execution.kinds.trunk import Trunk

TRUNK, STAGE, MOVE_WEIGHTS = Trunk(), Stage(), MoveWeights()
FORGET = Freeing("forget", DeviceState.forget_counts, everywhere=False)
FREE_CACHE = Freeing("free-cache", DeviceState.free_cache)
# calls that a step makes before its trunk
BEFORE: tuple[Kind[Any], ...] = (Count(), SlotUpdates(), PageCopies())
AFTER: tuple[Kind[Any], ...] = (Score(), Pool())  # and after it, with results for the host
KINDS: tuple[Kind[Any], ...] = (
    Allocate(),
    Allocation(ALLOCATE_COUNTS, lambda spec: spec.counts, everywhere=False),
    Allocation(ALLOCATE_LORAS, lambda spec: spec.stacks or None),
    WriteLora(),
    Allocation(ALLOCATE_POOL, lambda spec: None if spec.images is None else spec.images.pool),
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
