"""Changes that parameters make to logits before sampling, in vLLM's order: mask, stops, bias, penalties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jengine.execution.sampling_row import Sampling

COUNT_CHUNK = 512  # tokens counted in one call
ALL_ALLOWED = np.uint32(0xFFFFFFFF)


def mask_words(vocab: int) -> int:
    """uint32 words in a row of a token mask. Token t is allowed if bit t % 32 of word t // 32 is set."""
    return -(-vocab // 32)


def apply_mask(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Sets disallowed tokens to -inf. logits [rows, vocab], mask uint32 [rows, mask_words(vocab)]."""
    token = jnp.arange(logits.shape[-1])
    bits = mask[:, token // 32] >> (token % 32).astype(jnp.uint32)
    return jnp.where(bits & 1 == 1, logits, -jnp.inf)


def masking(mask: jax.Array) -> jax.Array:
    """Rows that a mask changes, bool [rows]."""
    return (mask != ALL_ALLOWED).any(-1)


def early_stops(sampling: Sampling, positions: jax.Array) -> jax.Array:
    """Stop tokens of rows that have not reached min_tokens: int32 [rows, DEVICE_STOPS], padded with -1."""
    return jnp.where((positions < sampling.min_position)[:, None], sampling.stop_ids, -1)


def suppress(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Sets each row's tokens, int32 [rows, n], to -inf. Negative ids are ignored."""
    ids = jnp.where(tokens >= 0, tokens, logits.shape[-1])  # out-of-range ids are dropped
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")


def biasing(sampling: Sampling) -> jax.Array:
    """Rows that `add_bias` changes, bool [rows]."""
    return ((sampling.bias_ids >= 0) & (sampling.bias != 0)).any(-1)


def add_bias(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Adds each row's logit_bias."""
    ids = jnp.where(sampling.bias_ids >= 0, sampling.bias_ids, logits.shape[-1])
    return logits.at[jnp.arange(logits.shape[0])[:, None], ids].add(sampling.bias, mode="drop")


def penalizing(sampling: Sampling) -> jax.Array:
    """Rows that `penalize` changes, bool [rows]. The null slot has a repetition penalty of 0."""
    repetition = (sampling.repetition_penalty != 1) & (sampling.repetition_penalty != 0)
    return repetition | (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0)


def penalize(logits: jax.Array, sampling: Sampling, counts: jax.Array) -> jax.Array:
    """Repetition (Keskar et al., 2019), frequency and presence penalties. counts: int32 [rows, vocab]: twice
    the token's occurrences in the output, plus 1 if it is in the prompt.
    """
    repetition = sampling.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    times = counts >> 1
    logits -= sampling.frequency_penalty[:, None] * times
    return logits - sampling.presence_penalty[:, None] * (times > 0)


def count_tokens(counts: jax.Array, packed: jax.Array) -> jax.Array:
    """Counts a chunk of a sequence's known tokens in its slot.

    Args:
        counts: int32 [slots, vocab], see `penalize`.
        packed: int32 [3 + COUNT_CHUNK]: the slot; 1 to reset its counts first; number of the tokens that
            belong to the prompt; tokens, padded with the vocabulary size.
    """
    slot, fresh, prompt = packed[0], packed[1], packed[2]
    tokens = packed[3:]
    of_prompt = jnp.arange(tokens.shape[0]) < prompt
    row = jnp.where(fresh == 1, 0, counts[slot])
    output = row.at[jnp.where(of_prompt, row.shape[0], tokens)].add(2, mode="drop")
    in_prompt = jnp.zeros_like(row).at[jnp.where(of_prompt, tokens, row.shape[0])].set(1, mode="drop")
    return counts.at[slot].set(output | in_prompt)


def count_chunks(slot: int, tokens: list[int], prompt_len: int, vocab: int) -> list[np.ndarray]:
    """The `packed` arguments of `count_tokens` for these tokens."""
    chunks = []
    for start in range(0, len(tokens), COUNT_CHUNK):
        packed = np.full(3 + COUNT_CHUNK, vocab, np.int32)
        chunk = tokens[start : start + COUNT_CHUNK]
        packed[:3] = slot, start == 0, min(max(prompt_len - start, 0), len(chunk))
        packed[3 : 3 + len(chunk)] = chunk
        chunks.append(packed)
    return chunks
