"""The order in which persistent thread blocks take the items of a prompt's attention."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention.walk import Walk, longest_first


def taken(walk: Walk) -> list[list[int]]:
    """Items of each block, in its order."""
    return [
        [walk.item(block, number) for number in range(walk.rounds(block))] for block in range(walk.blocks)
    ]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60).map(lambda work: sorted(work, reverse=True)),
    st.integers(1, 20),
)
def test_each_item_is_taken_once_and_sums_differ_by_one_item_at_most(work: list[int], blocks: int) -> None:
    items = taken(Walk(len(work), min(blocks, len(work))))
    assert sorted(item for block in items for item in block) == list(range(len(work)))
    assert all(block == sorted(block) for block in items), "items without work come last"
    sums = [sum(work[item] for item in block) for block in items]
    assert max(sums) - min(sums) <= work[0]


@pytest.mark.parametrize("seed", range(3))
def test_tiles_that_see_the_most_come_first_and_empty_ones_last(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, lengths = 64 * rng.integers(0, 6, 20), rng.integers(0, 3, 20) * 32
    index, *others = np.asarray(
        longest_first(jnp.asarray(positions, jnp.int32), jnp.asarray(lengths, jnp.int32))
    )
    np.testing.assert_array_equal(
        index, np.argsort(-np.where(lengths > 0, positions + lengths, 0), stable=True)
    )
    np.testing.assert_array_equal(others, [positions[index], lengths[index]])
