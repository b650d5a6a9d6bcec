"""The states before each token of a batch, against sequences that are known as a whole."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np

from jengine.execution.attention import TokenAxis
from jengine.execution.draft import empty_batch, noted, read, states_before
from jengine.execution.slots import KeptStates

SLOTS, DRAFTS, SIZE, TILE = 5, 3, 2, 8
MOST = DRAFTS + 1


def state(slot: int, position: int) -> list[float]:
    """What a model would have computed."""
    return [100.0 * slot + position, 1.0]


def test_each_token_gets_the_state_before_it() -> None:
    """Rows that verify drafts, of which any number counts; rows and tiles that continue a prompt; new
    sequences in slots that others had; and hits, after which the first state is unknown.
    """
    draw = random.Random(0)
    kept = KeptStates(jnp.zeros((SLOTS, MOST, SIZE)), jnp.zeros((SLOTS, MOST), jnp.int32))
    ends: dict[int, int | None] = dict.fromkeys(range(1, SLOTS))  # the next position; None: no sequence
    seen = 0
    for _ in range(60):
        rows, tiles = list[tuple[int, int]](), list[tuple[int, int, int]]()
        known = dict[tuple[int, int], bool]()
        for slot in draw.sample(range(1, SLOTS), draw.randint(1, SLOTS - 1)):
            end, fresh = ends[slot], False
            if end is None or draw.random() < 0.2:
                end, fresh = draw.choice([0, 0, 16]), True
                kept = kept._replace(followers=kept.followers.at[slot].set(0))
            length = draw.choice([1, 1, 2, MOST, 7, 11])
            known[slot, end] = not fresh
            if length > MOST or draw.random() < 0.3:
                tiles += [(slot, p, min(TILE, end + length - p)) for p in range(end, end + length, TILE)]
                ends[slot] = end + length
            else:
                rows += [(slot, p) for p in range(end, end + length)]
                ends[slot] = end + draw.randint(1, length)  # as many as count
        rows += [(0, 0)] * (16 - len(rows))
        tiles += [(0, 0, 0)] * (8 - len(tiles))
        slots, positions = np.array(rows, np.int32).T
        batch = empty_batch(16)._replace(
            row_slots=slots,
            row_positions=positions,
            row_tokens=np.full(16, 5, np.int32),
            tile_slots=np.array([tile[0] for tile in tiles], np.int32),
            tile_positions=np.array([tile[1] for tile in tiles], np.int32),
            tile_lengths=np.array([tile[2] for tile in tiles], np.int32),
            tile_tokens=np.zeros((8, TILE), np.int32),
        )
        axis = TokenAxis(jnp.zeros((SLOTS, 2), jnp.int32), batch)
        owner, position = np.asarray(axis.owner), np.asarray(axis.positions)
        states = jnp.array([state(s, p) for s, p in zip(owner, position, strict=True)])
        before = np.asarray(states_before(axis, batch, states, kept))
        for i in np.flatnonzero(np.asarray(axis.real)):
            at = int(owner[i]), int(position[i])
            unknown = at[1] == 0 or not known.get(at, True)
            assert before[i].tolist() == ([0.0, 0.0] if unknown else state(at[0], at[1] - 1))
            seen += not unknown
        kept = noted(axis, batch, states, kept)
        for slot, end in ends.items():
            if end is not None:  # as a draft asks for its first token
                found = read(kept, np.array([slot]), np.array([end]))
                assert np.asarray(found)[0].tolist() == state(slot, end - 1)
    assert seen > 300
