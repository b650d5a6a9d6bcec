"""Which layers share a block table: cache groups, by what of the past their attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from jengine.config import ModelConfig

SIMILAR = 1.25  # kinds of about as many layers make groups of the larger count: a few layers' room is lost, not another block table


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values of a token lie in one page, and are kept for equally long.

    A page holds `page_size` tokens of every layer of its group. All groups' pages are of equal size, that of the largest group, and so
    share one pool: layer `layers[i]` of each group lives in the pool's i-th pair of arrays.

    Attributes:
        kind: "full": a query reads all tokens before it; "window": the last `window` of them, its own included.
    """

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    window: int | None = None


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model, full attention first. Layers of one kind are split into groups about as large as the rarest kind's."""
    kinds: dict[int | None, list[int]] = {}
    for layer in range(config.num_layers):
        kinds.setdefault(config.window(layer), []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < SIMILAR * min(counts) else min(counts)
    groups = []
    for window in sorted(kinds, key=lambda window: (window is not None, window)):
        layers = kinds[window]
        parts = -(-len(layers) // size)
        cuts = [len(layers) * i // parts for i in range(parts + 1)]  # as even as can be
        for start, end in pairwise(cuts):
            groups.append(CacheGroup("full" if window is None else "window", tuple(layers[start:end]), window))
    return tuple(groups)


def homes(groups: tuple[CacheGroup, ...]) -> dict[int, tuple[int, int]]:
    """Of each layer, its group and its place among the group's layers."""
    return {layer: (number, place) for number, group in enumerate(groups) for place, layer in enumerate(group.layers)}
