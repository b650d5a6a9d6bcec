"""The layout of a model's cache: what each layer declares, and groups of layers that share a block table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

# if counts of layers differ by less, groups have the larger count: this wastes little and saves a block table
SIMILAR = 1.25
TOKENS = -1  # in a shape: the number of tokens per page
Kind = Literal["full", "window", "latent", "state"]


@dataclass(frozen=True, slots=True)
class PageArray:
    """An array [pages, *shape] that each layer of a group has.

    Attributes:
        shape: shape of a page; TOKENS stands for the number of its tokens.
        sharded: the axis of `shape` that is sharded over the mesh; None: replicated.
        dtype: None: the cache's dtype. An eight-bit array also has a float32 scale for each row of the last
            axis.
    """

    shape: tuple[int, ...]
    sharded: int | None = 0
    dtype: str | None = None

    def page(self, page_size: int) -> tuple[int, ...]:
        """The shape of a page with page_size tokens."""
        return tuple(page_size if size == TOKENS else size for size in self.shape)

    @property
    def elements(self) -> int:
        """Number of elements per token, on all devices together."""
        return math.prod(size for size in self.shape if size != TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """A token's queries in a layer, on one device.

    Attributes:
        heads, dim: number of query heads, and channels of each.
        rank: number of a cached vector's channels that are its value, in latent attention.
        soft_cap: see `Attend`.
        slopes: whether heads have slopes (ALiBi).
    """

    heads: int
    dim: int
    rank: int | None = None
    soft_cap: float | None = None
    slopes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """What a layer keeps in the cache, and what a token does with it; declared by its attention or
    recurrence.

    Attributes:
        kind, window, arrays: as in CacheGroup.
        operations: of a token for each cached token that it sees, or, with a state, of a token. Without
            padding, on all devices together.
        channels: numbers of a token that are live while the layer mixes tokens, on one device; a generous
            count.
        queries: None for a state.
        reads: index of the layer whose keys and values this layer attends to; it caches none itself. None:
            the layer caches its own.
    """

    kind: Kind
    arrays: tuple[PageArray, ...]
    operations: int
    channels: int
    window: int | None = None
    queries: Queries | None = None
    reads: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table: they store a token in the same page and free it at the same time.

    A page holds `page_size` tokens of every layer of its group. All groups of a pool have pages of the same
    size, that of the largest group. Layer `layers[i]` of each group uses the pool's i-th arrays. If layers of
    one group store less per token than those of another, several of them share a place in the pool, and each
    has a part of every page.

    Attributes:
        kind: "full": a query reads all tokens up to its own. "window": it reads the last `window` tokens,
            including its own. "latent": it reads all tokens, stored in a compressed form that all heads
            share. "state": a page holds a recurrent state instead of tokens; at most one group, the last, has
            this kind, and it has a separate pool.
        arrays: arrays of each layer, in the order of its attention's arguments: keys and values, or their
            compressed form. For a state: those of the convolution and of the recurrence, as far as the layer
            has them.
        pool: index of the pool of its pages.
        parts: number of layers that share a place.
        queries: of each layer.
        apart: whether its layers have places of their own, in which they keep a token on the page that the
            first group has for it; see `apart`.
    """

    kind: Kind
    layers: tuple[int, ...]
    window: int | None = None
    arrays: tuple[PageArray, ...] = ()
    pool: int = 0
    parts: int = 1
    queries: Queries | None = None
    apart: bool = False

    def token_bytes(self, itemsize: float, devices: int = 1) -> float:
        """Bytes per token on each device, for all layers of the group; 0 for a state, which does not grow
        with tokens.

        Args:
            itemsize: bytes per number of the cache's dtype, including scales.
        """
        if self.kind == "state":
            return 0.0
        sizes = [array.elements / (1 if array.sharded is None else devices) for array in self.arrays]
        return len(self.layers) * sum(sizes) * itemsize


def cache_groups(entries: Sequence[CacheEntry], *, spread: bool = False) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers, full attention first, states last.

    Layers of a kind are split into groups about as large as the rarest kind.

    Args:
        spread: whether each group has layers from the whole model, rather than neighbours. So each stage of a
            pipeline has few layers of each group, and needs as few places.
    """
    kinds: dict[tuple[Kind, int | None], list[int]] = {}
    for layer, entry in enumerate(entries):
        if entry.reads in (None, layer):
            kinds.setdefault((entry.kind, entry.window), []).append(layer)
    states = kinds.pop(("state", None), [])
    first = {kind: entries[layers[0]] for kind, layers in kinds.items()}
    page = math.lcm(*(entry.arrays[0].elements for entry in first.values()))
    parts = {kind: page // entry.arrays[0].elements for kind, entry in first.items()}
    counts = [-(-len(layers) // parts[kind]) for kind, layers in kinds.items()]  # places per kind
    size = max(counts) if max(counts) < SIMILAR * min(counts) else min(counts)
    groups = []
    for kind, window in sorted(kinds, key=lambda kind: (kind[1] is not None, kind)):
        layers, entry, share = kinds[kind, window], first[kind, window], parts[kind, window]
        number = -(-len(layers) // (size * share))
        cuts = [len(layers) * i // number for i in range(number + 1)]  # as even as possible
        whole = CacheGroup(kind, (), window, entry.arrays, parts=share, queries=entry.queries)
        parted = (
            [layers[i::number] for i in range(number)] if spread else [layers[a:b] for a, b in pairwise(cuts)]
        )
        groups += [dataclasses.replace(whole, layers=tuple(some)) for some in parted]
    if states:
        groups.append(CacheGroup("state", tuple(states), arrays=entries[states[0]].arrays, pool=1))
    return tuple(groups)


def apart(entries: Sequence[CacheEntry]) -> CacheGroup | None:
    """One group of all layers of a draft model, beside the groups of the model that it drafts for. None: its
    layers keep different arrays, or states.

    Layers with a window keep all tokens.
    """
    layers = [layer for layer, entry in enumerate(entries) if entry.reads in (None, layer)]
    first = entries[layers[0]]
    if any(entries[layer].arrays != first.arrays or entries[layer].kind == "state" for layer in layers):
        return None
    kind: Kind = "latent" if first.kind == "latent" else "full"
    return CacheGroup(kind, tuple(layers), arrays=first.arrays, queries=first.queries, apart=True)


def paged(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    """The groups whose pages hold tokens. Each has a block table."""
    return tuple(group for group in groups if group.kind != "state")


def places(groups: tuple[CacheGroup, ...], pool: int) -> list[tuple[PageArray, ...]]:
    """The arrays of a pool, by place. If its groups' arrays differ, each group has views of arrays with
    shorter rows. Layers of groups that are apart come last.

    Rows have the greatest common divisor of the groups' head_dims. So an eight-bit array has at least one
    scale for each row of every group's view.
    """
    more = [group.arrays for group in groups if group.apart and group.pool == pool for _ in group.layers]
    shared = [group for group in groups if group.pool == pool and not group.apart]
    if not shared:
        return more
    same = len({group.arrays for group in shared}) == 1
    dim = math.gcd(*(array.shape[-1] for group in shared for array in group.arrays))
    [arrays] = {
        tuple(array if same else _joined(array, group.parts, dim) for array in group.arrays)
        for group in shared
    }
    return [*[arrays] * max(-(-len(group.layers) // group.parts) for group in shared), *more]


def _joined(array: PageArray, parts: int, dim: int) -> PageArray:
    return PageArray((parts * array.elements // dim, TOKENS, dim), array.sharded, array.dtype)


def homes(groups: tuple[CacheGroup, ...]) -> dict[int, tuple[int, int, int]]:
    """Maps each layer to its group, its place in the pool and its part of the place."""
    return {
        layer: (number, *divmod(index, group.parts))
        for number, group in enumerate(groups)
        for index, layer in enumerate(group.layers)
    }
