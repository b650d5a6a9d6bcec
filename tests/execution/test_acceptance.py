"""Which samples of rows with drafts count, and what later rows and steps see of them."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.execution.sampler import _noted, accepted, drafts_before, with_drafts
from jengine.execution.trunk import ToSample
from jengine.table.program_table import MOST_DRAFTS


@pytest.mark.parametrize("seed", range(20))
def test_acceptance(seed: int) -> None:
    """Compared with going through each slot's rows in order."""
    draw = random.Random(seed)
    slots, tokens, positions, samples = list[int](), list[int](), list[int](), list[int]()
    count, before, last = list[bool](), list[list[int]](), dict[int, tuple[int, int]]()
    for slot in draw.sample(range(1, 20), draw.randint(1, 6)):
        start, right, seen = draw.randrange(50), True, list[int]()
        for offset in range(draw.choice([1, 1, 3, MOST_DRAFTS + 1])):
            token = draw.randrange(3)
            if offset:
                right = right and token == samples[-1]
                seen.append(token)
            slots.append(slot)
            tokens.append(token)
            positions.append(start + offset)
            samples.append(draw.randrange(3))
            count.append(right)
            before.append([*seen])
            if right:
                last[slot] = samples[-1], positions[-1]
    padding = draw.randint(0, 4)
    rows = [np.array([*values, *[0] * padding], np.int32) for values in (slots, positions, tokens, samples)]
    to = ToSample(jnp.zeros((len(rows[0]), 1)), *map(jnp.asarray, rows[:3]))
    counted = accepted(to, jnp.asarray(rows[3]))
    assert counted[: len(count)].tolist() == count
    drafts = np.asarray(drafts_before(to))
    assert [sorted(row[row >= 0].tolist()) for row in drafts[: len(before)]] == [*map(sorted, before)]
    assert (drafts[len(before) :] == -1).all()
    noted = np.asarray(_noted(jnp.full((20, 2), -7), to, jnp.asarray(rows[3]), counted))
    for slot in range(1, 20):
        assert tuple(noted[slot]) == last.get(slot, (-7, -7))


def test_counts_include_the_drafts_before_a_sample() -> None:
    counts = jnp.array([[2, 1, 0], [2, 1, 0]])
    got = with_drafts(counts, jnp.array([[-1, -1], [2, 2]]))
    np.testing.assert_array_equal(got, [[2, 1, 0], [2, 1, 4]])


def test_a_single_row() -> None:
    to = ToSample(jnp.zeros((1, 1)), jnp.array([3]), jnp.array([7]), jnp.array([1]))
    assert accepted(to, jnp.array([2])).tolist() == [True] and drafts_before(to).shape == (1, 0)
