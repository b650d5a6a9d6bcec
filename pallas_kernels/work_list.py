"""Divides the work of decode attention evenly: lists the tiles of the sequences that each thread block reads.

The tiles of all live (row, kv head) pairs form one line, pair after pair, and each block takes an equal part
of it. A border within a pair splits the pair; its parts go to scratch slots, and the block that has the last
part joins them. So the grid does not depend on the number of rows of a program, rows without a sequence cost
nothing, and one long sequence among short ones keeps the whole GPU busy.

A list depends only on lengths and a window, so all layers of a cache group share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

TILE = 64  # tokens
LEAST = 4  # minimum tiles per block; with fewer, a join costs more than another block saves
PARTS = 8  # of fixed size; the longest row can be split into at least this many


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """The items and joins of each block, as int32 arrays.

    Attributes:
        first: [blocks + 1, 2]; block b processes the items first[b, 0], ..., first[b + 1, 0] - 1, and then
            the joins first[b, 1], ..., first[b + 1, 1] - 1.
        items: [max items, 7]: row, kv head, first tile, number of tiles, the row's length, the slot for a
            part's result, or -1 if the item is a whole pair, and the join that waits for the part in a later
            block, or -1.
        joins: [max joins, 5]: row, kv head, first slot and number of slots of a split pair, and how many of
            its parts are in other blocks. Zeros join nothing.
        signals: [max joins], a semaphore for each join, or a reference to them; see `shared`.
        slots: number of slots.
    """

    first: jax.Array
    items: jax.Array
    joins: jax.Array
    signals: Any
    slots: int = field(metadata={"static": True})

    @property
    def blocks(self) -> int:
        return len(self.first) - 1

    def shared(self) -> WorkList:
        """The same list, for several calls of one program: its semaphores are cleared once for all of
        them.
        """
        return replace(self, signals=jax.new_ref(self.signals))


def even_work(lengths: jax.Array, kv_heads: int, *, blocks: int, window: int | None = None) -> WorkList:
    """Gives blocks equal numbers of tiles, to within one. Some blocks stay idle if each would have fewer than
    LEAST tiles.

    Args:
        lengths: int32 [rows], tokens of each sequence including the query's; 0 for a row without a sequence.
        blocks: number of thread blocks.
        window: tokens that a query sees, including its own; None: all.
    """
    start, tiles = _tiles(lengths, window)
    # live rows, and tiles of the line, before each row
    live, before = _before(tiles > 0), _before(kv_heads * tiles)
    borders = _borders(before[-1], blocks)

    row = _find(before, borders)
    place = borders - before[row]  # among the row's tiles of all kv heads
    size = jnp.maximum(tiles[row], 1)
    pair = live[row] * kv_heads + place // size
    inside = (borders < before[-1]) & (place % size > 0)
    number = jnp.arange(blocks + 1, dtype=jnp.int32)
    same = inside & (pair[:, None] == pair)  # borders within the same pair
    parts = jnp.sum(same, axis=1, dtype=jnp.int32) + 1
    last = jnp.max(jnp.where(same, number, 0), axis=1)  # the last of them, where the pair's last block begins
    # the first border within its pair
    new = inside & (jnp.min(jnp.where(same, number, blocks), axis=1) == number)
    cuts = _before(inside)[1:]
    slots = cuts + _before(new)[1:]  # parts that end at or before each border, plus the one that begins there
    first = pair + cuts

    item = jnp.arange(kv_heads * len(lengths) + blocks - 1, dtype=jnp.int32)
    block = _find(first, item)
    nth = pair[block] + item - first[block]
    r, head = _find(live, nth // kv_heads), nth % kv_heads
    begin = before[r] + head * tiles[r]
    at, end = jnp.maximum(borders[block], begin), jnp.minimum(borders[block + 1], begin + tiles[r])
    slot = jnp.where(at > begin, slots[block] - 1, slots[block + 1] - 2)
    join = jnp.where(end < begin + tiles[r], last[block + 1], -1)
    items = [
        r,
        head,
        start[r] + at - begin,
        end - at,
        lengths[r],
        jnp.where(end - at < tiles[r], slot, -1),
        join,
    ]
    joins = [row, place // size, slots - parts, parts, parts - 1]
    table = _table(joins, inside & (last == number))[:-1]
    both = jnp.stack([first, number], axis=1)
    return WorkList(
        both, _table(items, item < first[-1]), table, jnp.zeros_like(number[:-1]), max(1, 2 * (blocks - 1))
    )


def fixed_work(
    lengths: jax.Array, kv_heads: int, *, blocks: int, tokens: int, window: int | None = None
) -> WorkList:
    """Splits sequences at multiples of a size that does not depend on lengths, so a row's result does not
    depend on other rows.

    Args:
        tokens: the maximum length of a row.
        The others: see `even_work`.
    """
    rows = len(lengths)
    longest = -(-tokens // TILE)
    step = max(LEAST, -(-longest // max(PARTS, 4 * blocks // (rows * kv_heads))))
    most = -(-longest // step)
    start, tiles = _tiles(lengths, window)
    before = _before(kv_heads * tiles)
    lowest = start // step
    parts = jnp.where(tiles > 0, -(-(start + tiles) // step) - lowest, 0)
    number = _before(kv_heads * parts)  # each row's first item

    item = jnp.arange(rows * kv_heads * most, dtype=jnp.int32)
    r, there = _find(number, item), item < number[-1]
    head, part = jnp.divmod(item - number[r], jnp.maximum(parts[r], 1))
    at = jnp.maximum(start[r], (lowest[r] + part) * step)
    end = jnp.minimum(start[r] + tiles[r], (lowest[r] + part + 1) * step)
    position = before[r] + head * tiles[r] + at - start[r]
    borders = _borders(before[-1], blocks)
    first = jnp.sum(there & (position < borders[:, None]), axis=1, dtype=jnp.int32)

    split = _before(jnp.where(parts > 1, kv_heads, 0))  # each row's first join
    # the item's block, and that of its pair's last
    block, to = _find(first, item), _find(first, item - part + parts[r] - 1)
    waiting = there & (parts[r] > 1)
    items = [
        r,
        head,
        at,
        end - at,
        lengths[r],
        jnp.where(waiting, item, -1),
        jnp.where(waiting & (block < to), split[r] + head, -1),
    ]

    join = jnp.arange(rows * kv_heads, dtype=jnp.int32)
    r = _find(split, join)
    head = join - split[r]
    slot = number[r] + head * parts[r]
    to = _find(first, slot + parts[r] - 1)
    joins = _table([r, head, slot, parts[r], jnp.maximum(first[to] - slot, 0)], join < split[-1])
    ends = joins[:, 2] + joins[:, 3]
    first_join = jnp.sum((join < split[-1]) & (ends <= first[:, None]), axis=1, dtype=jnp.int32)
    return WorkList(
        jnp.stack([first, first_join], axis=1), _table(items, there), joins, jnp.zeros_like(join), len(item)
    )


def _tiles(lengths: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """The first tile that each row's query sees, and the number of tiles; int32 [rows]."""
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // TILE
    return first, (lengths + TILE - 1) // TILE - first


def _borders(tiles: jax.Array, blocks: int) -> jax.Array:
    """Each block's first tile on a line of `tiles` tiles, and the end of the last block; int32 [blocks +
    1].
    """
    used = jnp.clip(tiles // LEAST, 1, blocks)
    number = jnp.minimum(jnp.arange(blocks + 1, dtype=jnp.int32), used)
    return number * (tiles // used) + jnp.minimum(number, tiles % used)


def _before(counts: jax.Array) -> jax.Array:
    """The exclusive cumulative sum of counts, and their total; int32 [n + 1]. XLA compiles this to one
    kernel, cumsum to several.
    """
    place = jnp.arange(len(counts) + 1)
    return jnp.sum(jnp.where(place[:-1] < place[:, None], counts, 0), axis=1, dtype=jnp.int32)


def _find(starts: jax.Array, x: jax.Array) -> jax.Array:
    """Index of the last interval [starts[i], starts[i + 1]) that begins at or before x, for any larger x the
    last interval.
    """
    return jnp.clip(
        jnp.searchsorted(starts, x, side="right", method="compare_all") - 1, 0, len(starts) - 2
    ).astype(jnp.int32)


def _table(columns: list[jax.Array], there: jax.Array) -> jax.Array:
    """The columns as [n, columns], with zeros in rows that are not there."""
    return jnp.where(there[:, None], jnp.stack(columns, axis=1), 0).astype(jnp.int32)
