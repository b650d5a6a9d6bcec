"""The work list of decode attention: each tile of each live (group of rows, kv head) pair exactly once,
evenly.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.work_list import LEAST, PARTS, TILE, WorkList, even_work, fixed_work, most_rows

ROWS, TOKENS = 6, 40 * TILE
LENGTHS = st.lists(st.integers(0, TOKENS) | st.just(0) | st.just(TOKENS), min_size=ROWS, max_size=ROWS)
# lengths of the first row of a sequence, often such that a tile ends in its rows, and numbers of its rows
ENDS = st.builds(lambda tiles, before: tiles * TILE - before, st.integers(1, 39), st.integers(0, 8))
SEQUENCES = st.lists(
    st.tuples(ENDS | st.integers(1, TOKENS - 12), st.sampled_from([1, 2, 3, 5, 9])), max_size=6
)
MANY = 12  # rows, of some sequences and padding
EXAMPLES = settings(max_examples=30, deadline=None)
Key = tuple[int, int]  # first row, kv head


class Item(NamedTuple):
    row: int
    head: int
    start: int
    count: int
    length: int
    slot: int
    join: int
    rows: int


# compiled a few times, for all examples
@partial(jax.jit, static_argnames=("kv_heads", "blocks", "window", "fixed", "most_rows"))
def made(
    lengths: jax.Array,
    kv_heads: int,
    blocks: int,
    window: int | None,
    fixed: bool,
    owners: jax.Array | None = None,
    most_rows: int = 1,
) -> WorkList:
    how: dict[str, Any] = {"blocks": blocks, "window": window, "owners": owners, "most_rows": most_rows}
    return (
        fixed_work(lengths, kv_heads, tokens=TOKENS, **how) if fixed else even_work(lengths, kv_heads, **how)
    )


def of_blocks(work: WorkList) -> list[list[Item]]:
    first, items = (
        np.asarray(work.first[:, 0]).tolist(),
        [Item(*fields) for fields in np.asarray(work.items).tolist()],
    )
    assert first[0] == 0 and first == sorted(first)
    assert not any(any(item) for item in items[first[-1] :])  # defined, where nothing is
    return [items[first[b] : first[b + 1]] for b in range(work.blocks)]


def check(
    lengths: list[int],
    kv_heads: int,
    blocks: int,
    window: int | None,
    fixed: bool,
    groups: dict[int, int] | None = None,
    **how: Any,
) -> list[list[Item]]:
    """groups: numbers of rows by first row; None: each row is one."""
    work = made(jnp.asarray(lengths, jnp.int32), kv_heads, blocks, window, fixed, **how)
    groups = groups or {row: 1 for row, length in enumerate(lengths) if length}
    by_block = of_blocks(work)
    read: list[tuple[int, int, int]] = []
    parts: dict[Key, list[int]] = {}
    for item in chain(*by_block):
        assert item.length == lengths[item.row] and item.count > 0 and item.rows == groups[item.row]
        read += [(item.row, item.head, item.start + i) for i in range(item.count)]
        if item.slot >= 0:
            parts.setdefault((item.row, item.head), []).append(item.slot)
    seen = {
        row: range(max(lengths[row] - (window or TOKENS), 0) // TILE, -(-lengths[row + size - 1] // TILE))
        for row, size in groups.items()
    }
    assert sorted(read) == [
        (row, head, tile) for row, tiles in seen.items() for head in range(kv_heads) for tile in tiles
    ]
    whole = [item for item in chain(*by_block) if item.slot < 0]
    assert all(item.count == len(seen[item.row]) for item in whole)
    used = [slot + i for (row, _), slots in parts.items() for slot in slots for i in range(groups[row])]
    assert len({*used}) == len(used) and all(slot < work.slots for slot in used)
    check_joins(work, by_block, parts)
    return by_block


def check_joins(work: WorkList, by_block: list[list[Item]], parts: dict[Key, list[int]]) -> None:
    """The block that has a pair's last part joins all, and waits for those in earlier blocks, which
    signal.
    """
    first, joins = np.asarray(work.first[:, 1]).tolist(), np.asarray(work.joins).tolist()
    assert first[0] == 0 and first == sorted(first) and len(work.signals) == len(joins) >= first[-1]
    blocks: dict[Key, list[int]] = {}
    for block, items in enumerate(by_block):
        for item in items:
            if item.slot >= 0:
                blocks.setdefault((item.row, item.head), []).append(block)
    joined = {}
    for block in range(work.blocks):
        for index in range(first[block], first[block + 1]):
            row, head, slot, count, elsewhere, rows = joins[index]
            if count:
                joined[row, head] = [*range(slot, slot + count * rows, rows)]
                there = blocks[row, head]
                assert {item.rows for items in by_block for item in items if item.row == row} == {rows}
                assert max(there) == block and elsewhere == sum(other < block for other in there)
                waits = [
                    item.join for items in by_block for item in items if (item.row, item.head) == (row, head)
                ]
                assert waits == [index if other < block else -1 for other in there]
    assert joined == parts and all(len(slots) > 1 for slots in parts.values())
    assert all(item.join == -1 for items in by_block for item in items if item.slot < 0)


@EXAMPLES
@given(
    lengths=LENGTHS,
    kv_heads=st.just(3),
    blocks=st.sampled_from([1, 7, 64]),
    window=st.sampled_from([None, 130]),
)
def test_every_tile_is_read_once_and_blocks_have_equal_numbers(
    lengths: list[int], kv_heads: int, blocks: int, window: int | None
) -> None:
    by_block = check(lengths, kv_heads, blocks, window, fixed=False)
    tiles = [sum(item.count for item in items) for items in by_block]
    working = [n for n in tiles if n]
    assert tiles[: len(working)] == working  # the first ones
    if working:
        assert max(working) - min(working) <= 1
        assert len(working) == max(1, min(blocks, sum(tiles) // LEAST))


@EXAMPLES
@given(
    lengths=LENGTHS, kv_heads=st.just(2), blocks=st.sampled_from([5, 64]), window=st.sampled_from([None, 900])
)
def test_cuts_at_fixed_places_do_not_depend_on_other_rows(
    lengths: list[int], kv_heads: int, blocks: int, window: int | None
) -> None:
    by_block = check(lengths, kv_heads, blocks, window, fixed=True)
    cuts = {(item.start, item.count, item.slot < 0) for items in by_block for item in items if item.row == 0}
    alone = of_blocks(
        made(jnp.asarray([lengths[0], *[0] * (ROWS - 1)], jnp.int32), kv_heads, blocks, window, True)
    )
    assert cuts == {(item.start, item.count, item.slot < 0) for items in alone for item in items}
    tiles = [sum(item.count for item in items) for items in by_block]
    largest = max([item.count for items in by_block for item in items], default=0)
    assert max(tiles) <= -(-sum(tiles) // min(blocks, max(1, sum(tiles) // LEAST))) + largest
    assert largest <= max(LEAST, -(-TOKENS // TILE // PARTS))


def rows_of(sequences: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Lengths and owners of the rows of sequences, in the order given, and of padding."""
    lengths = [first + i for first, count in sequences for i in range(count)][:MANY]
    owners = [1 + number for number, (_, count) in enumerate(sequences) for _ in range(count)][:MANY]
    padding = [0] * (MANY - len(lengths))
    return lengths + padding, owners + padding


def grouped(lengths: list[int], owners: list[int], most: int, step: int | None, window: int | None) -> Any:
    """Sizes of groups by first row; step: tokens between fixed cuts, which rows of a group must share."""
    groups: dict[int, int] = {}
    cuts = [
        step and (max(length - (window or TOKENS), 0) // step, (length - 1) // step) for length in lengths
    ]
    first = 0
    for row, length in enumerate(lengths):
        before = row - 1
        if (
            row
            and length
            and (owners[row], lengths[row], cuts[row]) == (owners[before], lengths[before] + 1, cuts[before])
            and groups.get(first, most) < most
        ):
            groups[first] += 1
        elif length:
            first, groups[row] = row, 1
    return groups


@EXAMPLES
@given(
    sequences=SEQUENCES,
    kv_heads=st.just(2),
    blocks=st.sampled_from([7, 64]),
    window=st.sampled_from([None, 130]),
    most=st.sampled_from([3, 8]),
)
def test_rows_of_a_sequence_read_tiles_together(
    sequences: list[tuple[int, int]], kv_heads: int, blocks: int, window: int | None, most: int
) -> None:
    lengths, owners = rows_of(sequences)
    how: dict[str, Any] = {"owners": jnp.asarray(owners, jnp.int32), "most_rows": most}
    check(lengths, kv_heads, blocks, window, False, grouped(lengths, owners, most, None, window), **how)
    step = TILE * max(LEAST, -(-TOKENS // TILE // max(PARTS, 4 * blocks // (MANY * kv_heads))))
    groups = grouped(lengths, owners, most, step, window)
    by_block = check(lengths, kv_heads, blocks, window, True, groups, **how)
    # cuts of each row as if it were alone
    alone = made(jnp.asarray(lengths, jnp.int32), kv_heads, blocks, window, True)
    of_row: dict[int, set[int]] = {}
    for item in chain(*of_blocks(alone)):
        of_row.setdefault(item.row, set()).add(item.start * TILE // step)
    for item in chain(*by_block):
        assert all(item.start * TILE // step in of_row[item.row + i] for i in range(item.rows))


def test_rows_of_other_sequences_and_of_other_places_stay_apart() -> None:
    lengths = [5, 6, 7, 7, 8, 10, 11, 0, 1, 0]
    owners = [1, 1, 2, 1, 1, 1, 1, 0, 0, 0]
    work = made(jnp.asarray(lengths, jnp.int32), 1, 4, None, False, jnp.asarray(owners, jnp.int32), 8)
    found = [(item.row, item.rows) for item in chain(*of_blocks(work))]
    assert found == [(0, 2), (2, 1), (3, 2), (5, 2), (8, 1)]


def test_a_product_holds_eight_rows_or_fewer() -> None:
    assert [most_rows(group, 256) for group in (1, 4, 8, 9, 16, 17, 32, 33, 64)] == [
        8,
        8,
        8,
        4,
        4,
        2,
        2,
        1,
        1,
    ]
    assert most_rows(4, 5) == 5


@pytest.mark.parametrize("rows", [1, 256])
def test_the_grid_does_not_depend_on_the_row_bucket(rows: int) -> None:
    """Nor does what the live row's blocks do."""
    work = made(jnp.zeros(rows, jnp.int32).at[0].set(1 << 15), 8, 264, None, False)
    assert work.blocks == 264 and work.joins.shape == (264, 6)
    tiles = [sum(item.count for item in items) for items in of_blocks(work)]
    assert sum(tiles) == 8 * (1 << 15) // TILE and max(tiles) - min(tiles) == 1


def test_sums_fit_32_bits() -> None:
    """With as many tiles as a chip's memory can hold, times blocks, they would not."""
    work = made(jnp.full(1024, 1 << 17, jnp.int32), 8, 264, None, False)
    tiles = [sum(item.count for item in items) for items in of_blocks(work)]
    assert sum(tiles) == 1024 * 8 * (1 << 17) // TILE and max(tiles) - min(tiles) <= 1
