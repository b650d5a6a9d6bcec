"""Effects of parameters on logits, compared with plain numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jengine.core.request import SamplingParams
from jengine.execution.logits import (
    COUNT_CHUNK,
    add_bias,
    apply_mask,
    count_chunks,
    count_tokens,
    mask_words,
    penalize,
)
from jengine.execution.sampling_row import pack_sampling, sampling_of
from jengine.scheduling.step_plan import SlotReset
from tests.execution.oracle import adjusted

ROWS, VOCAB, SLOTS = 4, 75, 3
apply, penalized, biased, counted = (
    jax.jit(apply_mask),
    jax.jit(penalize),
    jax.jit(add_bias),
    jax.jit(count_tokens),
)


def sampling(*params: SamplingParams):
    return sampling_of(
        jnp.asarray(np.stack([pack_sampling(SlotReset(1, p, 0, 0, 5, ()))[1:] for p in params]))
    )


def counts_of(prompt: list[int], output: list[int]) -> np.ndarray:
    """Counts as stored on the device."""
    row = np.zeros(VOCAB, np.int32)
    for token in output:
        row[token] += 2
    row[list({*prompt})] |= 1
    return row


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
)
def test_penalties(seed: int, prompt: list[int], output: list[int]) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 4
    params = [
        SamplingParams(
            repetition_penalty=float(rng.choice([1.0, 0.5, 1.7])),
            presence_penalty=float(rng.choice([0.0, -2.0, 1.1])),
            frequency_penalty=float(rng.choice([0.0, 2.0, -0.3])),
        )
        for _ in range(ROWS)
    ]
    got = penalized(logits, sampling(*params), np.stack([counts_of(prompt, output)] * ROWS))
    for row, p, raw in zip(np.asarray(got), params, logits, strict=True):
        np.testing.assert_allclose(row, adjusted(raw, p, prompt=prompt, output=output), atol=1e-4)


def test_no_penalty_changes_no_bit() -> None:
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    full = np.full((ROWS, VOCAB), 7, np.int32)
    np.testing.assert_array_equal(penalized(logits, sampling(*[SamplingParams()] * ROWS), full), logits)


def test_bias_is_added_to_its_tokens_and_no_others() -> None:
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    biases = [None, {0: 1.5}, {VOCAB - 1: -100.0, 3: 2.0}, {i: float(i) for i in range(VOCAB)}]
    got = np.asarray(biased(logits, sampling(*(SamplingParams(logit_bias=b) for b in biases))))
    for row, raw, bias in zip(got, logits, biases, strict=True):
        want = raw.copy()
        for token, value in (bias or {}).items():
            want[token] += value
        np.testing.assert_array_equal(row, want)


@settings(max_examples=20)
@given(st.lists(st.sets(st.integers(0, VOCAB - 1)), min_size=ROWS, max_size=ROWS))
def test_mask(allowed: list[set[int]]) -> None:
    words = np.zeros((ROWS, mask_words(VOCAB)), np.uint32)
    for row, tokens in zip(words, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= np.uint32(1 << token % 32)
    got = np.asarray(apply(np.ones((ROWS, VOCAB), np.float32), words))
    assert [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in got] == allowed


@pytest.mark.parametrize("prompt_len", [1, 300, COUNT_CHUNK, COUNT_CHUNK + 1, 1200])
@pytest.mark.parametrize("length", [1, COUNT_CHUNK, COUNT_CHUNK + 1, 1300])
def test_counting_by_chunks(length: int, prompt_len: int) -> None:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    counts = jnp.full((SLOTS, VOCAB), 9, jnp.int32)  # what the slot's last owner left
    for chunk in count_chunks(2, tokens, prompt_len, VOCAB):
        counts = counted(counts, chunk)
    np.testing.assert_array_equal(counts[2], counts_of(tokens[:prompt_len], tokens[prompt_len:]))
    assert (np.asarray(counts[:2]) == 9).all(), "a neighbour was touched"
