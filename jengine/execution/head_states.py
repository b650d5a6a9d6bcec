"""The states of the model that a head reads (MTP, EAGLE-3): those at the token before each token.

In a batch it is mostly the neighbouring token's. Slots keep the states of their last tokens, for the first
token of the next batch: of as many tokens as a step verifies, since only its samples tell which of them the
next batch follows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jengine.execution.attention import TokenAxis
from jengine.execution.batch import Batch
from jengine.execution.slots import KeptStates


def states_before(axis: TokenAxis, batch: Batch, states: jax.Array, kept: KeptStates) -> jax.Array:
    """The state at the token before each of the axis, [N, size]; zeros where it is not known.

    Args:
        states: at the tokens of the axis, [N, size].
    """
    rows, (tiles, length) = batch.row_slots.shape[0], batch.tile_tokens.shape
    real, owner, positions = axis.real, axis.owner, axis.positions
    neighbours = real & jnp.roll(real, 1) & (owner == jnp.roll(owner, 1))
    neighbours &= positions == jnp.roll(positions, 1) + 1
    before = jnp.where(neighbours[:, None], jnp.roll(states, 1, axis=0), 0)

    def first(at: slice) -> jax.Array:
        known = read(kept, owner[at], positions[at])
        return jnp.where(neighbours[at, None], before[at], known)

    of_rows = first(slice(0, rows))
    if not tiles:
        return of_rows
    by_tile = before[rows:].reshape(tiles, length, -1)
    by_tile = jnp.concatenate([first(slice(rows, None, length))[:, None], by_tile[:, 1:]], axis=1)
    return jnp.concatenate([of_rows, by_tile.reshape(tiles * length, -1)])


def read(kept: KeptStates, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """The states before the tokens at these positions of slots, int32 [n] each -> [n, size]; zeros where they
    are not known.
    """
    place = (positions - 1) % kept.followers.shape[1]
    known = (positions > 0) & (kept.followers[slots, place] == positions)
    return jnp.where(known[:, None], kept.states[slots, place], 0)


def noted(axis: TokenAxis, batch: Batch, states: jax.Array, kept: KeptStates) -> KeptStates:
    """With the states of the last rows of each slot, and of the last token of its last tile."""
    rows, (tiles, length) = batch.row_slots.shape[0], batch.tile_tokens.shape
    most = kept.followers.shape[1]
    ends = rows + length * jnp.arange(tiles) + jnp.maximum(batch.tile_lengths - 1, 0)
    at = jnp.concatenate([jnp.arange(rows), ends])
    # a later token of the slot has the same place
    later = jnp.concatenate([_again(batch.row_slots, most), _again(batch.tile_slots, 1)])
    slots = jnp.where(axis.real[at] & ~later, axis.owner[at], 0)
    positions = axis.positions[at]
    place = positions % most
    return KeptStates(
        kept.states.at[slots, place].set(states[at]), kept.followers.at[slots, place].set(positions + 1)
    )


def _again(slots: jax.Array, behind: int) -> jax.Array:
    """Whether an entry is followed by one of the same slot, so many entries behind it; bool [n]."""
    padded = jnp.pad(slots, (0, behind))
    return padded[behind : behind + slots.shape[0]] == slots
