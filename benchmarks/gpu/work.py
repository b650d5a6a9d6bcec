"""The minimum work of attention: bytes moved and operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Shape(NamedTuple):
    """The heads and pages of one layer."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 64

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


LLAMA = Shape()  # Llama with 8B parameters
SMALL = Shape(kv_heads=2, group=2, head_dim=64, page_size=16)


def decode_bytes(shape: Shape, lengths: Sequence[int], itemsize: int = 2, scale_bytes: int = 0) -> int:
    """Bytes to read every key and value once, and to read queries and write results once, at two bytes per
    number.

    Args:
        lengths: lengths of the rows. Rows of length 0 are padding; only their results count.
        itemsize: bytes per number in the cache.
        scale_bytes: bytes of scales per token and kv head, for keys and for values each.
    """
    cached = 2 * sum(lengths) * shape.kv_heads * (shape.head_dim * itemsize + scale_bytes)
    rows = len(lengths) + sum(length > 0 for length in lengths)
    return cached + rows * shape.heads * shape.head_dim * 2


def prefill_operations(shape: Shape, sequences: int, tokens: int) -> int:
    """Operations of both products of causal attention over whole prompts, at two operations per
    multiply-add.
    """
    return 4 * shape.heads * shape.head_dim * sequences * (tokens * (tokens + 1) // 2)
