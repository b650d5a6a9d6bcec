"""Ranges of a prompt that a step computes as a whole: cuts, hits, and what their tokens see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jengine.scheduling.pages.block_table import ahead, meets, next_range, outside
from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.batching import BatchInvariant, Composition
from jengine.scheduling.shape import CacheShape

TILE, PAGE = 8, 4
Cut = tuple[int, list[tuple[int, int]]]


@st.composite
def prompts(draw: st.DrawFn) -> Cut:
    """A length, and ranges."""
    at, ranges = 0, []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=4)):
        ranges.append((at + gap, at + gap + size))
        at += gap + size
    return at + draw(st.integers(1, 20)), ranges


@given(prompts())
def test_ranges(prompt: Cut) -> None:
    length, ranges = prompt
    inside = {token for start, end in ranges for token in range(start + 1, end)}
    for position in range(length):
        kept = outside(ranges, position)
        assert kept not in inside and {*range(kept + 1, position + 1)} <= inside
        later = [(max(start, position), end) for start, end in ranges if end > position]
        assert next_range(ranges, position) == (later[0] if later else None)
        for end in range(position + 1, length + 1):
            some = any(start < end and stop > position for start, stop in ranges)
            assert meets(ranges, position, end) == some
    last = [next((end - 1 for start, end in ranges if start <= at < end), at) for at in range(length)]
    for begin in range(0, length, 3):
        seen = ahead(ranges, begin, length)
        wanted = [to - at for at, to in enumerate(last)][begin:]
        assert ([0] * len(wanted) if seen is None else seen.tolist()) == wanted


@given(prompts(), st.lists(st.integers(3, 12), min_size=1, max_size=6), st.integers(0, 40), st.booleans())
def test_chunks(prompt: Cut, budgets: list[int], hit: int, invariant: bool) -> None:
    """No chunk splits a range, and every step with room for one makes progress. With batch invariance, tiles
    are the same whatever the budgets and hits.
    """
    length, ranges = prompt
    how: Composition = BatchInvariant(TILE, 64) if invariant else Composition()
    sequence: Any = SimpleNamespace(whole=ranges)

    def tiles(start: int, budgets: list[int]) -> list[tuple[int, int]]:
        out, step = list[tuple[int, int]](), 0
        while start < length:
            left, begun = budgets[step % len(budgets)], start
            while left and start < length:
                end = how.end(sequence, start, min(start + left * TILE, length), length)
                if end <= start:
                    break
                assert outside(ranges, end) == end
                out += [(at, min(at + TILE, end)) for at in range(start, end, TILE)]
                left -= -(-(end - start) // TILE)
                start = end
            assert start > begun
            step += 1
        return out

    found = tiles(0, budgets)
    assert [0, *(end for _, end in found)] == [*(start for start, _ in found), length]
    if invariant:
        assert found == tiles(0, [12])
        start = max(at for at in range(0, min(hit, length - 1) + 1, TILE) if outside(ranges, at) == at)
        assert tiles(start, budgets) == [tile for tile in found if tile[0] >= start]


@given(prompts(), st.sampled_from([PAGE, TILE]), st.sampled_from([None, 6]))
def test_hits_end_outside(prompt: Cut, grid: int, window: int | None) -> None:
    length, ranges = prompt
    tokens = [*range(length)]
    blocks = BlockManager(
        CacheShape(page_size=PAGE, num_pages=99, windows=[window], prefix_caching=True),
        hit_grid=grid,
    )
    blocks.admit(0, blocks.match(tokens, None), length, None)
    blocks.grow(0, length)
    blocks.commit(0, tokens, length)
    blocks.release(0)
    hit = blocks.match(tokens, None, ranges).tokens
    allowed = [at for at in range(0, length, grid) if outside(ranges, at) == at]
    assert hit == max(allowed)
