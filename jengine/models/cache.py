"""The layout of a model's cache: groups of layers, and the arrays of each group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jengine.models.by_layer import at, kv_layer
from jengine.models.config import ModelConfig
from jengine.models.config_parts import LinearAttention

# if counts of layers differ by less, groups have the larger count: this wastes little and saves a block table
SIMILAR = 1.25
TOKENS = -1  # in a shape: the number of tokens per page


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
    """

    kind: Literal["full", "window", "latent", "state"]
    layers: tuple[int, ...]
    window: int | None = None
    arrays: tuple[PageArray, ...] = ()
    pool: int = 0
    parts: int = 1

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


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model, full attention first. Layers of a kind are split into groups about as large as
    the rarest kind.
    """
    if config.latent is not None:  # one vector per token, on each device
        array = PageArray((1, TOKENS, config.latent.cached_dim), sharded=None)
        return (CacheGroup("latent", tuple(range(config.num_layers)), arrays=(array,)),)
    kinds: dict[int | None, list[int]] = {}
    recurrent = () if config.linear is None else config.linear.layers
    for layer in sorted({*range(config.num_layers)} - {*recurrent}):
        if kv_layer(config, layer) == layer:
            kinds.setdefault(config.window(layer), []).append(layer)
    shapes = {window: at(config, layers[0]) for window, layers in kinds.items()}
    heads = {
        window: PageArray((shape.num_kv_heads_padded, TOKENS, shape.head_dim))
        for window, shape in shapes.items()
    }
    page = math.lcm(*(array.elements for array in heads.values()))
    parts = {window: page // array.elements for window, array in heads.items()}
    counts = [-(-len(layers) // parts[window]) for window, layers in kinds.items()]  # places per kind
    size = max(counts) if max(counts) < SIMILAR * min(counts) else min(counts)
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        layers = kinds[window]
        kind: Literal["full", "window"] = "full" if window is None else "window"
        number = -(-len(layers) // (size * parts[window]))
        cuts = [len(layers) * i // number for i in range(number + 1)]  # as even as possible
        arrays = (heads[window], heads[window])
        groups += [
            CacheGroup(kind, tuple(layers[a:b]), window, arrays, parts=parts[window])
            for a, b in pairwise(cuts)
        ]
    if config.linear is not None:
        groups.append(CacheGroup("state", recurrent, arrays=_state(config, config.linear), pool=1))
    return tuple(groups)


def _state(config: ModelConfig, linear: LinearAttention) -> tuple[PageArray, ...]:
    """The arrays of a recurrent state: a convolution's previous inputs, and each head's matrix."""
    laid = config.padded(linear.key_heads)
    before = PageArray((linear.taps - 1, laid * linear.channels), sharded=1, dtype="float32")
    matrices = PageArray((laid * linear.group, linear.key_dim, linear.value_dim), dtype="float32")
    return (before,) * (linear.taps > 0) + (matrices,) * (linear.key_dim > 0)


def paged(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    """The groups whose pages hold tokens. Each has a block table."""
    return tuple(group for group in groups if group.kind != "state")


def places(groups: tuple[CacheGroup, ...], pool: int) -> list[tuple[PageArray, ...]]:
    """The arrays of a pool, by place. If its groups' arrays differ, each group has views of arrays with
    shorter rows.

    Rows have the greatest common divisor of the groups' head_dims. So an eight-bit array has at least one
    scale for each row of every group's view.
    """
    own = [group for group in groups if group.pool == pool]
    one = len({group.arrays for group in own}) == 1
    dim = math.gcd(*(array.shape[-1] for group in own for array in group.arrays))
    [arrays] = {
        tuple(array if one else _joined(array, group.parts, dim) for array in group.arrays) for group in own
    }
    return [arrays] * max(-(-len(group.layers) // group.parts) for group in own)


def _joined(array: PageArray, parts: int, dim: int) -> PageArray:
    return PageArray((parts * array.elements // dim, TOKENS, dim), array.sharded, array.dtype)


def homes(groups: tuple[CacheGroup, ...]) -> dict[int, tuple[int, int, int]]:
    """Maps each layer to its group, its place in the pool and its part of the place."""
    return {
        layer: (number, *divmod(index, group.parts))
        for number, group in enumerate(groups)
        for index, layer in enumerate(group.layers)
    }
