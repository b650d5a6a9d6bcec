"""Which tiles of a prompt a persistent block of threads works on, and in what order.

Items are cut from tiles in equal numbers and sorted by their tile's work. Blocks take one each, back and forth: the block that took the
longest of a round takes the shortest of the next. So their sums of work differ by less than the longest item, without counting anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


def longest_first(positions: jax.Array, lengths: jax.Array) -> jax.Array:
    """Tiles by their last token's position, the latest first; those of no tokens come last.

    Returns:
        int32 [3, tiles]: indices of tiles, their positions, their lengths. By comparisons rather than by a sort, of which XLA makes
        several kernels on a GPU.
    """
    index = jnp.arange(len(positions), dtype=jnp.int32)
    ends = jnp.where(lengths > 0, positions + lengths, 0)
    before = (ends[None] > ends[:, None]) | ((ends[None] == ends[:, None]) & (index[None] < index[:, None]))
    is_at = before.sum(1, dtype=jnp.int32)[None] == index[:, None]
    return jnp.stack([jnp.where(is_at, x[None], 0).sum(1, dtype=jnp.int32) for x in (index, positions, lengths)])


@dataclass(frozen=True)
class Walk:
    """Items 0, ..., items - 1, by decreasing work, shared among blocks."""

    items: int
    blocks: int

    def rounds(self, block: jax.Array) -> jax.Array:
        """Items of a block."""
        full, rest = divmod(self.items, self.blocks)
        return full + (self._place(block, jnp.int32(full)) < rest).astype(jnp.int32)

    def item(self, block: jax.Array, number: jax.Array) -> jax.Array:
        """The block's item of this number."""
        return number * self.blocks + self._place(block, number)

    def _place(self, block: jax.Array, number: jax.Array) -> jax.Array:
        return jnp.where(lax.rem(number, 2) == 0, block, self.blocks - 1 - block)
