"""The order in which persistent thread blocks take the items of a prompt's attention.

Every tile has the same number of items, and items are sorted by their tile's work. In each round every block
takes one item, and the direction alternates: the block with the longest item of a round takes the shortest of
the next. So the blocks' total work differs by at most the longest item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


def longest_first(positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """Sorts tiles by their last token's position, latest first. Tiles without tokens come last.

    Compares all pairs, because XLA compiles a sort to several kernels on a GPU.

    Returns:
        int32 [3, tiles]: indices of tiles, their positions, their lengths.
    """
    index = jnp.arange(len(positions), dtype=jnp.int32)
    ends = jnp.where(lengths > 0, positions + lengths, 0)
    before = (ends[None] > ends[:, None]) | ((ends[None] == ends[:, None]) & (index[None] < index[:, None]))
    is_at = before.sum(1, dtype=jnp.int32)[None] == index[:, None]
    return jnp.stack(
        [jnp.where(is_at, x[None], 0).sum(1, dtype=jnp.int32) for x in (index, positions, lengths)]
    )


@dataclass(frozen=True)
class Walk:
    """Divides items 0, ..., items - 1, sorted by decreasing work, among blocks. Methods take integers or
    integer arrays.
    """

    items: int
    blocks: int

    def rounds(self, block: Any) -> Any:
        """Number of items of a block."""
        full, rest = divmod(self.items, self.blocks)
        return full + (self._place(block, full) < rest)

    def item(self, block: Any, number: Any) -> Any:
        """The item with this number among those of the block."""
        return number * self.blocks + self._place(block, number)

    def _place(self, block: Any, number: Any) -> Any:
        return block + (number & 1) * (self.blocks - 1 - 2 * block)
