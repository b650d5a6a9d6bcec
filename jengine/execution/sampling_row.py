"""A request's sampling parameters as 32-bit words, packed on the host and unpacked on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jengine.core.request import DEVICE_STOPS, MAX_LOGIT_BIAS
from jengine.scheduling.step_plan import SlotReset

# The row's layout: every field is 32 bits wide; lists of ids are padded with -1.
LAYOUT = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),  # 0 keeps all
        ("seed_low", np.uint32),
        ("seed_high", np.uint32),
        ("sample_index", np.int32),
        # number of most likely tokens, plus 1; 0: no log probabilities, not even the sampled token's
        ("logprobs", np.int32),
        ("min_position", np.int32),  # no stop token is sampled before this position
        ("lora", np.int32),  # the place of the request's adapter, from 1; 0: none. Trunks read it
        ("stop_ids", np.int32, DEVICE_STOPS),
        ("bias_ids", np.int32, MAX_LOGIT_BIAS),
        ("bias", np.float32, MAX_LOGIT_BIAS),
    ]
)
SAMPLING_WORDS = LAYOUT.itemsize // 4
LORA_WORD = LAYOUT.fields["lora"][1] // 4  # type: ignore[index]
# smallest normal number: processors may treat smaller ones, or their inverses, as 0
SMALLEST = float(np.finfo(np.float32).tiny)
INT32_MAX = int(np.iinfo(np.int32).max)


class Sampling(NamedTuple):
    """Sampling rows by field, in LAYOUT's order and dtypes: each [rows], lists [rows, MAX_...]."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    top_k: jax.Array
    seed_low: jax.Array
    seed_high: jax.Array
    sample_index: jax.Array
    logprobs: jax.Array
    min_position: jax.Array
    stop_ids: jax.Array
    bias_ids: jax.Array
    bias: jax.Array


def pack_sampling(reset: SlotReset) -> np.ndarray:
    """A reset as int32 [1 + SAMPLING_WORDS]: the slot, then its row of SlotState.sampling.

    Values out of the 32-bit range are clipped, which does not change the tokens.
    """
    params, seed = reset.params, reset.seed % 2**64
    row = np.zeros((), LAYOUT)
    row["temperature"] = 0.0 if params.greedy else min(max(params.temperature, SMALLEST), 1 / SMALLEST)
    row["top_p"] = max(params.top_p, SMALLEST)  # 0 would leave no token
    row["min_p"] = params.min_p
    row["repetition_penalty"] = min(max(params.repetition_penalty, SMALLEST), 1 / SMALLEST)
    row["presence_penalty"] = params.presence_penalty
    row["frequency_penalty"] = params.frequency_penalty
    row["top_k"] = min(max(params.top_k, 0), INT32_MAX)
    row["seed_low"], row["seed_high"] = seed % 2**32, seed >> 32
    row["sample_index"] = reset.sample_index
    row["logprobs"] = 0 if params.logprobs is None else params.logprobs + 1
    # with a grammar, masks suppress ends: it may be complete before min_tokens
    least = params.min_tokens if params.structured_outputs is None else 0
    row["min_position"] = min(reset.prompt_len + least, INT32_MAX)
    row["lora"] = reset.lora
    row["stop_ids"] = row["bias_ids"] = -1
    stops = reset.stop_token_ids[:DEVICE_STOPS]  # if there are more, a mask suppresses them
    row["stop_ids"][: len(stops)] = stops
    bias = params.logit_bias or {}
    row["bias_ids"][: len(bias)] = list(bias)
    row["bias"][: len(bias)] = list(bias.values())
    return np.concatenate([[np.int32(reset.slot)], row.reshape(1).view(np.int32)], dtype=np.int32)


def sampling_of(rows: jax.Array) -> Sampling:
    """Unpacks rows of SlotState.sampling, int32 [rows, SAMPLING_WORDS], by field."""

    def take(name: str) -> jax.Array:
        assert LAYOUT.fields is not None
        kind, offset = LAYOUT.fields[name][:2]
        words = rows[:, offset // 4 : (offset + kind.itemsize) // 4]
        return lax.bitcast_convert_type(words.reshape(-1, *kind.shape), kind.base)

    return Sampling(*map(take, Sampling._fields))
