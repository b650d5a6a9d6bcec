"""Divides the work of decode attention evenly: lists the tiles of the sequences that each thread block reads.

Several rows of a sequence at consecutive positions (drafts that are verified, the end of a prompt) form a
group: they read the same tiles, once, and each row masks what it does not see. A row that has no neighbour of
its sequence is a group of its own.

The tiles of all live (group, kv head) pairs form one line, pair after pair, and each block takes an equal
part of it. A border within a pair splits the pair; its parts go to scratch slots, and the block that has the
last part joins them. So the grid does not depend on the number of rows of a program, rows without a sequence
cost nothing, and one long sequence among short ones keeps the whole GPU busy.

A list depends only on lengths, on the rows that belong together, and on a window, so all layers of a cache
group share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantization.quantized import Pages
from pallas_kernels.targets import BLOCKS, cores

TILE = 64  # tokens
LEAST = 4  # minimum tiles per block; with fewer, a join costs more than another block saves
PARTS = 8  # of fixed size; the longest row can be split into at least this many
QUERIES = 64  # of a product of the tensor cores


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """The items and joins of each block, as int32 arrays.

    Attributes:
        first: [blocks + 1, 2]; block b processes the items first[b, 0], ..., first[b + 1, 0] - 1, and then
            the joins first[b, 1], ..., first[b + 1, 1] - 1.
        items: [max items, 8]: the group's first row, kv head, first tile, number of tiles, the first row's
            length, the first slot for a part's results, or -1 if the item is a whole pair, the join that
            waits for the part in a later block, or -1, and the number of rows.
        joins: [max joins, 6]: the first row, kv head, first slot and number of parts of a split pair, how
            many of them are in other blocks, and the number of rows. Zeros join nothing.
        signals: [max joins], a semaphore for each join, or a reference to them; see `shared`.
        slots: number of slots. Each row of a part has one; a pair's parts follow each other.
        most_rows: maximum number of rows of a group.
    """

    first: jax.Array
    items: jax.Array
    joins: jax.Array
    signals: Any
    slots: int = field(metadata={"static": True})
    most_rows: int = field(metadata={"static": True})

    @property
    def blocks(self) -> int:
        return len(self.first) - 1

    def shared(self) -> WorkList:
        """This list for several calls of one program: its semaphores are cleared once for all of them."""
        return replace(self, signals=jax.new_ref(self.signals))


def lines_of(group: int) -> int:
    """Lines of a product that a row's queries of a kv head take: TMA copies eight at a time."""
    return -(-group // 8) * 8


def most_rows(group: int, rows: int) -> int:
    """Maximum number of rows whose queries one product holds.

    Args:
        group: query heads per kv head.
        rows: of a step.
    """
    return max(1, min(rows, QUERIES // lines_of(group)))


def even_work(
    lengths: jax.Array,
    kv_heads: int,
    *,
    blocks: int,
    window: int | None = None,
    owners: jax.Array | None = None,
    most_rows: int = 1,
) -> WorkList:
    """Gives blocks equal numbers of tiles, to within one. Some blocks stay idle if each would have fewer than
    LEAST tiles.

    Args:
        lengths: int32 [rows], tokens of each sequence including the query's; 0 for a row without a sequence.
        blocks: number of thread blocks.
        window: tokens that a query sees, including its own; None: all.
        owners: int32 [rows], the sequence of each row. Rows form a group if they follow each other, have the
            same owner and, one after the other, one more token. None: no row has the sequence of another.
        most_rows: maximum number of rows of a group, see the function of this name.
    """
    rows = _group_sizes(lengths, most_rows, owners)
    start, tiles = _tiles(lengths, rows, window)
    # live groups, and tiles of the line, before each row
    live, before = _before(tiles > 0), _before(kv_heads * tiles)
    borders = _borders(before[-1], blocks)

    row = _find(before, borders)
    place = borders - before[row]  # among the group's tiles of all kv heads
    size = jnp.maximum(tiles[row], 1)
    pair = live[row] * kv_heads + place // size
    inside = (borders < before[-1]) & (place % size > 0)
    number = jnp.arange(blocks + 1, dtype=jnp.int32)
    same = inside & (pair[:, None] == pair)  # borders within the same pair
    parts = jnp.sum(same, axis=1, dtype=jnp.int32) + 1
    last = jnp.max(jnp.where(same, number, 0), axis=1)  # the last of them, where the pair's last block begins
    # the first border within its pair
    new = inside & (jnp.min(jnp.where(same, number, blocks), axis=1) == number)
    first = pair + _before(inside)[1:]
    # slots of parts that end at or before each border, and of the one that begins there
    slots = _before(rows[row] * (inside.astype(jnp.int32) + new))[1:]

    item = jnp.arange(kv_heads * len(lengths) + blocks - 1, dtype=jnp.int32)
    block = _find(first, item)
    nth = pair[block] + item - first[block]
    r, head = _find(live, nth // kv_heads), nth % kv_heads
    begin = before[r] + head * tiles[r]
    at, end = jnp.maximum(borders[block], begin), jnp.minimum(borders[block + 1], begin + tiles[r])
    slot = jnp.where(at > begin, slots[block] - rows[r], slots[block + 1] - 2 * rows[r])
    join = jnp.where(end < begin + tiles[r], last[block + 1], -1)
    items = [
        r,
        head,
        start[r] + at - begin,
        end - at,
        lengths[r],
        jnp.where(end - at < tiles[r], slot, -1),
        join,
        rows[r],
    ]
    joins = [row, place // size, slots - parts * rows[row], parts, parts - 1, rows[row]]
    cut = (blocks - 1) * most_rows
    table = _table(joins, inside & (last == number))[:-1]
    return WorkList(
        jnp.stack([first, number], axis=1),
        _table(items, item < first[-1]),
        table,
        jnp.zeros_like(number[:-1]),
        # the parts that end at borders, and the last one of each pair
        max(1, cut + min(cut, kv_heads * len(lengths))),
        most_rows,
    )


def fixed_work(
    lengths: jax.Array,
    kv_heads: int,
    *,
    blocks: int,
    tokens: int,
    window: int | None = None,
    owners: jax.Array | None = None,
    most_rows: int = 1,
) -> WorkList:
    """Splits sequences at multiples of a size that does not depend on lengths, so a row's result does not
    depend on other rows, be they of its group or not.

    A group has only rows that would each have the same parts alone. What a tile of another row adds to a row
    that does not see it is exactly zero.

    Args:
        tokens: the maximum length of a row.
        The others: see `even_work`.
    """
    pairs = len(lengths) * kv_heads
    longest = -(-tokens // TILE)
    step = max(LEAST, -(-longest // max(PARTS, 4 * blocks // pairs)))
    max_parts, part_tokens = -(-longest // step), step * TILE
    cuts = _first_seen(lengths, window) // part_tokens, (lengths - 1) // part_tokens
    rows = _group_sizes(lengths, most_rows, owners, *cuts)
    start, tiles = _tiles(lengths, rows, window)
    before = _before(kv_heads * tiles)
    lowest = start // step
    parts = jnp.where(tiles > 0, -(-(start + tiles) // step) - lowest, 0)
    number = _before(kv_heads * parts)  # each group's first item
    slots = _before(kv_heads * parts * rows)  # and its first slot

    item = jnp.arange(pairs * max_parts, dtype=jnp.int32)
    r, there = _find(number, item), item < number[-1]
    head, part = jnp.divmod(item - number[r], jnp.maximum(parts[r], 1))
    at = jnp.maximum(start[r], (lowest[r] + part) * step)
    end = jnp.minimum(start[r] + tiles[r], (lowest[r] + part + 1) * step)
    position = before[r] + head * tiles[r] + at - start[r]
    borders = _borders(before[-1], blocks)
    first = jnp.sum(there & (position < borders[:, None]), axis=1, dtype=jnp.int32)

    split = _before(jnp.where(parts > 1, kv_heads, 0))  # each group's first join
    # the item's block, and that of its pair's last
    block, to = _find(first, item), _find(first, item - part + parts[r] - 1)
    waiting = there & (parts[r] > 1)
    items = [
        r,
        head,
        at,
        end - at,
        lengths[r],
        jnp.where(waiting, slots[r] + (item - number[r]) * rows[r], -1),
        jnp.where(waiting & (block < to), split[r] + head, -1),
        rows[r],
    ]

    join = jnp.arange(pairs, dtype=jnp.int32)
    r = _find(split, join)
    head = join - split[r]
    begin = number[r] + head * parts[r]  # the pair's first item
    to = _find(first, begin + parts[r] - 1)
    slot = slots[r] + head * parts[r] * rows[r]
    elsewhere = jnp.maximum(first[to] - begin, 0)
    joins = _table([r, head, slot, parts[r], elsewhere, rows[r]], join < split[-1])
    ends = begin + parts[r]
    first_join = jnp.sum((join < split[-1]) & (ends <= first[:, None]), axis=1, dtype=jnp.int32)
    return WorkList(
        jnp.stack([first, first_join], axis=1),
        _table(items, there),
        joins,
        jnp.zeros_like(join),
        len(item),
        most_rows,
    )


def _group_sizes(lengths: jax.Array, limit: int, *alike: jax.Array | None) -> jax.Array:
    """Number of rows of the group that begins at each row, 0 for a group's other rows; int32 [rows].

    Args:
        limit: maximum number of rows of a group.
        alike: arrays [rows] in which all rows of a group have the same number; None: no row has that of
            another.
    """
    if limit == 1 or None in alike:
        return jnp.ones_like(lengths)
    row = jnp.arange(len(lengths), dtype=jnp.int32)
    follows = (lengths > 1) & (lengths == jnp.roll(lengths, 1) + 1) & (row > 0)
    for numbers in alike:
        assert numbers is not None
        follows &= numbers == jnp.roll(numbers, 1)
    # of the run of such rows that each row is in; one kernel computes both
    begin = jnp.max(jnp.where(~follows & (row <= row[:, None]), row, 0), axis=1)
    end = jnp.min(jnp.where(~follows & (row > row[:, None]), row, len(row)), axis=1)
    return jnp.where((row - begin) % limit == 0, jnp.minimum(end - row, limit), 0)


def _first_seen(lengths: jax.Array, window: int | None) -> jax.Array:
    """The first token that each row's query sees; int32 [rows]."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)


def _tiles(lengths: jax.Array, rows: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """The first tile that each group sees, and the number of tiles; int32 [rows].

    Args:
        lengths: of the first row of each group.
        rows: number of rows of each group.
    """
    first = _first_seen(lengths, window) // TILE
    return first, jnp.where(rows > 0, (lengths + rows + TILE - 2) // TILE - first, 0)


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


def decode_blocks(pages: Pages, device: jax.Device | None) -> int:
    """Thread blocks of a work list of decode attention over such pages: as many as the device runs at a time,
    for any number of rows.
    """
    stored, *_ = jax.tree.leaves(pages)
    return cores(device) * (BLOCKS if pages.shape[3] <= 64 * stored.dtype.itemsize else 1)
