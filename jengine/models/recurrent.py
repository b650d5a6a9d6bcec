"""Layers that keep a state instead of keys and values: their sizes, and what they keep in the cache."""

from __future__ import annotations

from dataclasses import dataclass

from jengine.models.cache import CacheEntry, PageArray
from jengine.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers that keep a state instead of keys and values: delta nets, convolutions alone, or lightning
    attention. Fields as in Hugging Face configs.

    Attributes:
        layers: indices of these layers.
        key_heads: number of query heads and of key heads; each is shared by the same number of consecutive
            value_heads.
        key_dim, value_dim: channels of a head. Without a recurrence, key_dim is 0, and only values are
            convolved.
        taps: width of the convolution over queries, keys and values, in tokens. Without a convolution: 0.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Channels of a key head's query, key and values together."""
        return 2 * self.key_dim + self.group * self.value_dim


def state_entry(config: ModelConfig, linear: LinearAttention, uses: int = 0) -> CacheEntry:
    """A convolution's previous inputs, and each head's matrix, as far as a layer has them.

    Args:
        uses: operations of a token for each element of the matrices.
    """
    laid = config.padded(linear.key_heads)
    before = PageArray((linear.taps - 1, laid * linear.channels), sharded=1, dtype="float32")
    matrices = PageArray((laid * linear.group, linear.key_dim, linear.value_dim), dtype="float32")
    return CacheEntry(
        kind="state",
        arrays=(before,) * (linear.taps > 0) + (matrices,) * (linear.key_dim > 0),
        operations=uses * linear.value_heads * linear.key_dim * linear.value_dim,
        channels=8 * laid // config.shards * linear.group * (linear.key_dim + linear.value_dim),
    )
