"""What attention must do at least: bytes that it moves and operations, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Shape(NamedTuple):
    """Heads of one layer."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


LLAMA = Shape()  # of 8B parameters
SMALL = Shape(kv_heads=2, group=2, head_dim=64, page_size=16)


def decode_bytes(shape: Shape, lengths: Sequence[int], itemsize: int = 2, scale_bytes: int = 0) -> int:
    """Every key and value read once, queries read and results written once, in two bytes a number.

    Args:
        lengths: of the rows; those of length 0 are padding, of which only the result counts.
        itemsize: of the cache's numbers.
        scale_bytes: for each token and kv head of keys, and of values.
    """
    cached = 2 * sum(lengths) * shape.kv_heads * (shape.head_dim * itemsize + scale_bytes)
    rows = len(lengths) + sum(length > 0 for length in lengths)
    return cached + rows * shape.heads * shape.head_dim * 2


def prefill_operations(shape: Shape, sequences: int, tokens: int) -> int:
    """Both products of causal attention, of whole prompts: two operations for each pair of a query and a key that it sees."""
    return 4 * shape.heads * shape.head_dim * sequences * (tokens * (tokens + 1) // 2)
