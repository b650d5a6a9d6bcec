"""Per-slot device state: what the next step needs of a running sequence, addressed by its slot. Slot 0 is null."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jengine.execution.sampling_row import SAMPLING_WORDS


class SlotState(NamedTuple):
    """The state of all slots; donated to every step and updated in place.

    Attributes:
        last_token: int32 [slots], the token that the slot's next decode row reads.
        block_table: int32 [slots, width], page ids in order.
        sampling: int32 [slots, SAMPLING_WORDS], see sampling_row.py; one array, so that a step takes few.
    """

    last_token: jax.Array
    block_table: jax.Array
    sampling: jax.Array


def abstract_slots(slots: int, width: int, sharding: jax.sharding.Sharding) -> SlotState:
    """SlotState's shapes for `slots` slots, the null slot included, and `width` pages a sequence."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    return SlotState(ints(slots), ints(slots, width), ints(slots, SAMPLING_WORDS))  # type: ignore[arg-type]
