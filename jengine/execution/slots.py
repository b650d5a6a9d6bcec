"""Device state of running sequences by slot. Slot 0 is the null slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.batch import ENTRY_WORDS, RESET_WORDS, Entry
from jengine.execution.sampling_row import pack_sampling
from jengine.scheduling.step_plan import SlotReset

ENTRIES, RESETS = 512, 16  # in one `update_slots`
UPDATE_WORDS = ENTRIES * ENTRY_WORDS + RESETS * RESET_WORDS


class KeptStates(NamedTuple):
    """States of the model at the last tokens of each slot, which a head reads; see draft.py. A token's
    place is its position modulo n.
    """

    states: jax.Array  # [slots, n, size]
    followers: jax.Array  # int32 [slots, n], the positions behind these tokens; 0: there is no state


class SlotState(NamedTuple):
    """The state of all slots; donated to every step and updated in place.

    Attributes:
        last: int32 [slots, 2], the token that the slot's next decode row reads, and its position. The program
            that samples the token writes both.
        drafts: int32 [slots, n], tokens that a draft model or head has proposed after the last one; None:
            there is none.
        block_table: int32 [cache groups, slots, width], page ids in order.
        sampling: int32 [slots, SAMPLING_WORDS], see sampling_row.py; a single array, so that a step has few
            arguments.
        kept: None: there is no head.
    """

    last: jax.Array
    block_table: jax.Array
    sampling: jax.Array
    drafts: jax.Array | None = None
    kept: KeptStates | None = None


def updated(slots: SlotState, entries: jax.Array, resets: jax.Array) -> SlotState:
    """Applies entries [n, ENTRY_WORDS] and resets [m, RESET_WORDS], as in a Batch."""
    group, slot, index, page = entries.T
    table, sampling, saved = slots.block_table.at[group, slot, index].set(page), slots.sampling, slots.kept
    if resets.shape[0]:
        sampling = sampling.at[resets[:, 0]].set(resets[:, 1:])
        if saved is not None:  # those of the sequence that had the slot before
            saved = saved._replace(followers=saved.followers.at[resets[:, 0]].set(0))
    return slots._replace(block_table=table, sampling=sampling, kept=saved)


def update_slots(slots: SlotState, packed: jax.Array) -> SlotState:
    """The slots, updated from a buffer of `pack_updates`: what does not fit into a step's buffer."""
    entries, resets = jnp.split(packed, [ENTRIES * ENTRY_WORDS])
    return updated(slots, entries.reshape(ENTRIES, ENTRY_WORDS), resets.reshape(RESETS, RESET_WORDS))


def pack_updates(entries: Sequence[Entry], resets: Sequence[SlotReset]) -> Iterator[np.ndarray]:
    """Buffers for `update_slots`, int32 [UPDATE_WORDS] each. Padding sets slot 0 to zeros."""
    for i in range(max(-(-len(entries) // ENTRIES), -(-len(resets) // RESETS))):
        buffer = np.zeros(UPDATE_WORDS, np.int32)
        some = np.asarray(entries[i * ENTRIES : (i + 1) * ENTRIES], np.int32).reshape(-1)
        buffer[: some.size] = some
        rows = [pack_sampling(reset) for reset in resets[i * RESETS : (i + 1) * RESETS]]
        if rows:
            buffer[ENTRIES * ENTRY_WORDS :][: len(rows) * RESET_WORDS] = np.concatenate(rows)
        yield buffer
