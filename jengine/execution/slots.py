"""Per-slot device state: what the next step needs of a running sequence, addressed by its slot. Slot 0 is null."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jengine.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jengine.scheduling.step_plan import SlotReset

FLOATS, SCALARS = 6, 11
STOPS = SCALARS + MAX_STOP_TOKEN_IDS  # where each list ends
BIAS_IDS = STOPS + MAX_LOGIT_BIAS
SAMPLING_WORDS = BIAS_IDS + MAX_LOGIT_BIAS
SMALLEST = float(np.finfo(np.float32).tiny)  # of normal numbers: processors may take a smaller one, or its inverse, for 0
INT32_MAX = int(np.iinfo(np.int32).max)


class SlotState(NamedTuple):
    """The state of all slots; donated to every step and updated in place.

    Attributes:
        last_token: int32 [slots], the token that the slot's next decode row reads.
        block_table: int32 [slots, width], page ids in order.
        sampling: int32 [slots, SAMPLING_WORDS], a `Sampling` row in words; one array, so that a step takes few.
    """

    last_token: jax.Array
    block_table: jax.Array
    sampling: jax.Array


class Sampling(NamedTuple):
    """Sampling parameters of rows, each [rows] but for lists, [rows, MAX_...]; ids are padded with -1."""

    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    repetition_penalty: jax.Array  # float32
    presence_penalty: jax.Array  # float32
    frequency_penalty: jax.Array  # float32
    top_k: jax.Array  # int32; 0 keeps all
    seed_low: jax.Array  # uint32
    seed_high: jax.Array  # uint32
    sample_index: jax.Array  # int32
    min_position: jax.Array  # int32; no stop token is sampled for a position before this
    stop_ids: jax.Array  # int32
    bias_ids: jax.Array  # int32
    bias: jax.Array  # float32


def pack_sampling(reset: SlotReset) -> np.ndarray:
    """A reset as int32 [1 + SAMPLING_WORDS]: the slot, then its row of SlotState.sampling.

    Values that 32 bits cannot hold become the nearest that they can: the tokens are the same.
    """
    params = reset.params
    temperature = 0.0 if params.greedy else min(max(params.temperature, SMALLEST), 1 / SMALLEST)
    top_p = max(params.top_p, SMALLEST)  # 0 would leave no token
    min_position = min(reset.prompt_len + params.min_tokens, INT32_MAX)
    row = np.full(1 + SAMPLING_WORDS, -1, np.int32)
    row[0] = reset.slot
    words = row[1:]
    repetition = min(max(params.repetition_penalty, SMALLEST), 1 / SMALLEST)
    penalties = repetition, params.presence_penalty, params.frequency_penalty
    words[:FLOATS] = np.array([temperature, top_p, params.min_p, *penalties], np.float32).view(np.int32)
    seed = np.array([reset.seed % 2**64], np.uint64).view(np.int32)
    words[FLOATS:SCALARS] = min(max(params.top_k, 0), INT32_MAX), *seed, reset.sample_index, min_position
    words[SCALARS : SCALARS + len(reset.stop_token_ids)] = reset.stop_token_ids
    if params.logit_bias:
        count = len(params.logit_bias)
        words[STOPS : STOPS + count] = list(params.logit_bias)
        words[BIAS_IDS : BIAS_IDS + count] = np.array(list(params.logit_bias.values()), np.float32).view(np.int32)
    return row


def sampling_of(rows: jax.Array) -> Sampling:
    """Rows of SlotState.sampling, int32 [rows, SAMPLING_WORDS], by name."""

    def cast(column: int, dtype: jax.typing.DTypeLike) -> jax.Array:
        return lax.bitcast_convert_type(rows[:, column], dtype)

    return Sampling(
        temperature=cast(0, jnp.float32),
        top_p=cast(1, jnp.float32),
        min_p=cast(2, jnp.float32),
        repetition_penalty=cast(3, jnp.float32),
        presence_penalty=cast(4, jnp.float32),
        frequency_penalty=cast(5, jnp.float32),
        top_k=rows[:, 6],
        seed_low=cast(7, jnp.uint32),
        seed_high=cast(8, jnp.uint32),
        sample_index=rows[:, 9],
        min_position=rows[:, 10],
        stop_ids=rows[:, SCALARS:STOPS],
        bias_ids=rows[:, STOPS:BIAS_IDS],
        bias=lax.bitcast_convert_type(rows[:, BIAS_IDS:], jnp.float32),
    )


def abstract_slots(slots: int, width: int, sharding: jax.sharding.Sharding) -> SlotState:
    """SlotState's shapes for `slots` slots, the null slot included, and `width` pages a sequence."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    return SlotState(ints(slots), ints(slots, width), ints(slots, SAMPLING_WORDS))  # type: ignore[arg-type]
