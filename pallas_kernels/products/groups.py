"""Orders rows by group, and divides them into blocks of the same group, without sorting and without loops."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.targets import CORES

GRID = 8  # rows; groups start at multiples of it
BLOCK = 8, 128  # minimum and maximum rows of a block
OUT = 64, 128  # minimum and maximum outputs of a block


class Groups(NamedTuple):
    """Places for rows such that the rows of a group are consecutive, and each group starts at a multiple of
    GRID.

    Attributes:
        place: int32 [rows], the place of each row; for rows of other groups, beyond all places.
        row: int32 [places], the row at each place; arbitrary for empty places. A whole block can be read from
            every start of a block.
        owner: int32 [places], the group at each place; arbitrary for empty places.
        size: int32 [groups], number of places of each group.
        group: int32 [blocks], the group of each block of at most `block` places.
        start, length: int32 [blocks], first place and number of places, in units of GRID; length 0 after the
            last block.
    """

    place: jax.Array
    row: jax.Array
    owner: jax.Array
    size: jax.Array
    group: jax.Array
    start: jax.Array
    length: jax.Array

    @property
    def block(self) -> int:
        """Rows of a block, of those that `grouped` made."""
        return len(self.row) - _most_places(len(self.place), len(self.size))


def counted(chosen: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """The number of rows in each group, int32 [groups], and each row's rank in its group, int32 [rows]."""
    hits = jax.nn.one_hot(chosen, groups, dtype=jnp.int32)  # [rows, groups]
    return hits.sum(0), ((jnp.cumsum(hits, axis=0) - 1) * hits).sum(-1)


def block_rows(rows: int, groups: int) -> int:
    """Rows of a block: twice the mean size of a group, so that most groups are one block, whose weights are
    read once.
    """
    least, largest = BLOCK
    return min(largest, max(least, 1 << (-(-2 * rows // groups) - 1).bit_length()))


def out_per_block(blocks: int, out: int) -> int:
    """Outputs that a thread block computes: as many as possible, if enough thread blocks remain for all
    multiprocessors.

    Args:
        blocks: blocks of rows, at most.
    """
    least, largest = OUT
    return largest if out % largest == 0 and blocks * (out // largest) >= CORES else least


def input_splits(blocks: int, rows: int, size: int, bits: int, least: int, cores: int) -> int:
    """Thread blocks that may share the inputs of a product with few outputs: enough for two blocks on each
    multiprocessor, unless writing and reading partial sums moves more than half the weight's bytes.

    Args:
        blocks: thread blocks of the product, if none share.
        size, bits: number of inputs, and bits of each weight.
        least: minimum inputs of a thread block.
    """
    worth = bits * size // (128 * max(rows, BLOCK[0]))
    return max(1, min(2 * cores // blocks, worth, size // least))


def one_group(rows: int, least: int = BLOCK[0]) -> tuple[Groups, int]:
    """Rows of one group where they lie, of which the last block may read some more; and a block's rows, at
    least so many.
    """
    block = min(BLOCK[1], max(least, 1 << (rows - 1).bit_length()))
    order, start = (
        jnp.arange(rows, dtype=jnp.int32),
        jnp.arange(-(-rows // block), dtype=jnp.int32) * (block // GRID),
    )
    taken = jnp.full(1, -(-rows // GRID), jnp.int32)
    length = jnp.clip(taken - start, 0, block // GRID)
    return Groups(
        order, order, jnp.zeros_like(order), taken * GRID, jnp.zeros_like(start), start, length
    ), block


def _most_places(rows: int, groups: int) -> int:
    """Maximum number of places that rows need."""
    return -(-(rows + (GRID - 1) * min(groups, rows)) // GRID) * GRID


def grouped(chosen: jax.Array, groups: int, among: int | None = None) -> Groups:
    """Groups rows that belong to groups `chosen`, int32 [rows].

    Args:
        among: how many groups there are in all; rows of those that are not here have numbers of at least
            `groups`, and get no place. None: all are here.
    """
    rows, block = len(chosen), block_rows(len(chosen), among or groups)
    sizes, rank = counted(chosen, groups)
    taken, per_block = -(-sizes // GRID), block // GRID
    ends, blocks = jnp.cumsum(taken), -(-taken // per_block)
    place = (ends - taken)[chosen] * GRID + rank
    nothing = jnp.zeros(_most_places(rows, groups) + block, jnp.int32)
    if among is not None:
        place = jnp.where(chosen < groups, place, len(nothing))
    row, owner = nothing.at[place].set(jnp.arange(rows, dtype=jnp.int32)), nothing.at[place].set(chosen)
    last = jnp.cumsum(blocks)
    index = jnp.arange(min(groups, rows) + rows // block, dtype=jnp.int32)  # maximum number of blocks
    # a search would be a loop
    group = jnp.minimum((last <= index[:, None]).sum(1, dtype=jnp.int32), groups - 1)
    start = (ends - taken)[group] + (index - (last - blocks)[group]) * per_block
    return Groups(place, row, owner, taken * GRID, group, start, jnp.clip(ends[group] - start, 0, per_block))
