"""The work of decode attention, shared out evenly: which tiles of which sequences each block of threads reads.

The tiles of all live (row, kv head) pairs lie on one line, pair after pair, and each block takes an equal part of it. A border within
a pair cuts it: its parts go to scratch slots and are joined afterwards. So the grid does not depend on how many rows a program has,
rows without a sequence cost nothing, and one long sequence among short ones keeps the whole chip busy.

A list depends on lengths and a window alone: one serves all layers of a cache group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

TILE = 64  # tokens
LEAST = 4  # tiles of a block at least: below that, a join costs more than another block saves
PARTS = 8  # of fixed size, that the longest row can be cut into at least


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """Which block does what, as int32 arrays.

    Attributes:
        first: [blocks + 1]; block b works on the items first[b], ..., first[b + 1] - 1.
        items: [most items, 6]: row, kv head, first tile, number of tiles, the row's length, and the slot for a part's result, or -1 if
            the item is a whole pair.
        joins: [most joins, 4]: row, kv head, first slot and number of slots of a pair that was cut; zeros where there is none.
        slots: number of slots.
    """

    first: jax.Array
    items: jax.Array
    joins: jax.Array
    slots: int = field(metadata={"static": True})

    @property
    def blocks(self) -> int:
        return len(self.first) - 1


def even_work(lengths: jax.Array, kv_heads: int, *, blocks: int, window: int | None = None) -> WorkList:
    """Blocks have equal numbers of tiles, to within one; fewer blocks work where they would have less than LEAST each.

    Args:
        lengths: int32 [rows], tokens of each sequence, the query's own included; 0 where there is none.
        blocks: of threads.
        window: tokens that a query sees, its own included; None: all.
    """
    start, tiles = _tiles(lengths, window)
    live, before = _before(tiles > 0), _before(kv_heads * tiles)  # rows, and tiles of the line, before each row
    borders = _borders(before[-1], blocks)

    row = _find(before, borders)
    place = borders - before[row]  # among the row's tiles of all kv heads
    size = jnp.maximum(tiles[row], 1)
    pair = live[row] * kv_heads + place // size
    inside = (borders < before[-1]) & (place % size > 0)
    new = inside & ~((pair == jnp.roll(pair, 1)) & jnp.roll(inside, 1))  # the first border within its pair
    within = jnp.sum(inside & (pair[:, None] == pair), axis=1, dtype=jnp.int32)  # borders within the same pair
    cuts = _before(inside)[1:]
    parts = cuts + _before(new)[1:]  # that end at a border or before it, and those that begin there
    first = pair + cuts

    item = jnp.arange(kv_heads * len(lengths) + blocks - 1, dtype=jnp.int32)
    block = _find(first, item)
    nth = pair[block] + item - first[block]
    r, head = _find(live, nth // kv_heads), nth % kv_heads
    begin = before[r] + head * tiles[r]
    at, end = jnp.maximum(borders[block], begin), jnp.minimum(borders[block + 1], begin + tiles[r])
    slot = jnp.where(at > begin, parts[block] - 1, parts[block + 1] - 2)
    items = [r, head, start[r] + at - begin, end - at, lengths[r], jnp.where(end - at < tiles[r], slot, -1)]
    joins = [row, place // size, parts - 2, 1 + within]
    return WorkList(first, _table(items, item < first[-1]), _table(joins, new)[1:], max(1, 2 * (blocks - 1)))


def fixed_work(lengths: jax.Array, kv_heads: int, *, blocks: int, tokens: int, window: int | None = None) -> WorkList:
    """Sequences are cut at multiples of a size that depends on no length, so that a row's result does not depend on the others.

    Args:
        tokens: that the longest row may have.
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
    number = _before(kv_heads * parts)  # of a row's first item

    item = jnp.arange(rows * kv_heads * most, dtype=jnp.int32)
    r, there = _find(number, item), item < number[-1]
    head, part = jnp.divmod(item - number[r], jnp.maximum(parts[r], 1))
    at = jnp.maximum(start[r], (lowest[r] + part) * step)
    end = jnp.minimum(start[r] + tiles[r], (lowest[r] + part + 1) * step)
    items = [r, head, at, end - at, lengths[r], jnp.where(parts[r] > 1, item, -1)]
    position = before[r] + head * tiles[r] + at - start[r]
    borders = _borders(before[-1], blocks)
    first = jnp.sum(there & (position < borders[:, None]), axis=1, dtype=jnp.int32)

    r, head = jnp.divmod(jnp.arange(rows * kv_heads, dtype=jnp.int32), kv_heads)
    joins = [r, head, number[r] + head * parts[r], parts[r]]
    return WorkList(first, _table(items, there), _table(joins, parts[r] > 1), len(item))


def _tiles(lengths: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """The first tile that each row's query sees, and how many; int32 [rows]."""
    first = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // TILE
    return first, (lengths + TILE - 1) // TILE - first


def _borders(tiles: jax.Array, blocks: int) -> jax.Array:
    """Where on a line of so many tiles each block begins, and the end; int32 [blocks + 1]."""
    used = jnp.clip(tiles // LEAST, 1, blocks)
    number = jnp.minimum(jnp.arange(blocks + 1, dtype=jnp.int32), used)
    return number * (tiles // used) + jnp.minimum(number, tiles % used)


def _before(counts: jax.Array) -> jax.Array:
    """Sums of the counts before each, and of all; int32 [n + 1]. XLA makes several kernels of a cumulative sum, one of this."""
    place = jnp.arange(len(counts) + 1)
    return jnp.sum(jnp.where(place[:-1] < place[:, None], counts, 0), axis=1, dtype=jnp.int32)


def _find(starts: jax.Array, x: jax.Array) -> jax.Array:
    """The last of the intervals [starts[i], starts[i + 1]) that begins at x or before; the last of all where x is behind it."""
    return jnp.clip(jnp.searchsorted(starts, x, side="right", method="compare_all") - 1, 0, len(starts) - 2).astype(jnp.int32)


def _table(columns: list[jax.Array], there: jax.Array) -> jax.Array:
    """[n, columns], zeros where nothing is there."""
    return jnp.where(there[:, None], jnp.stack(columns, axis=1), 0).astype(jnp.int32)
