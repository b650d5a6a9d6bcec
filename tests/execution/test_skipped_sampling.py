"""The parts that a CPU's samplers skip if no row uses them, and only these."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.core.request import MAX_LOGPROBS, SamplingParams
from jengine.execution.logits import ALL_ALLOWED, mask_words
from jengine.execution.sampler import sample, with_logprobs, with_wanted_logprobs
from jengine.execution.sampling_row import sampling_of
from tests.execution.test_sampler import GREEDY_ROW, ROWS, VOCAB, Row, compiled, logits_for, stacked

USES: dict[str, Row] = {
    "nothing": Row(SamplingParams()),
    "top_k": Row(SamplingParams(top_k=1)),
    "top_p": Row(SamplingParams(top_p=0.01)),
    "min_p": Row(SamplingParams(min_p=0.9)),
    "min_tokens": Row(SamplingParams(temperature=0.0, min_tokens=3), stops=(7,)),
    "repetition_penalty": Row(SamplingParams(temperature=0.0, repetition_penalty=50.0)),
    "frequency_penalty": Row(SamplingParams(temperature=0.0, frequency_penalty=2.0)),
    "presence_penalty": Row(SamplingParams(temperature=0.0, presence_penalty=2.0)),
    "logit_bias": Row(SamplingParams(temperature=0.0, logit_bias={"7": -100.0})),
    "mask": GREEDY_ROW,
}


@pytest.mark.parametrize("use", USES)
def test_what_one_row_uses_is_not_skipped_and_changes_no_other_row(use: str) -> None:
    """One row uses one feature; the others are padding, greedy rows and sampled rows without it. Token 7 is
    the likeliest.
    """
    logits = np.random.default_rng(1).normal(0, 0.1, (ROWS, VOCAB)).astype(np.float32)
    logits[:, 7] = 0.8
    plain = [Row(SamplingParams(), seed=i) if i % 2 else GREEDY_ROW for i in range(ROWS)]
    words, positions = stacked([*plain[:3], USES[use], *plain[4:]])
    words[-1] = 0  # the null slot
    counts, mask = np.full((ROWS, VOCAB), 0, np.int32), np.full((ROWS, mask_words(VOCAB)), ALL_ALLOWED)
    counts[:, 7] = 2  # it came once
    if use == "mask":
        mask[3, 0] ^= 1 << 7
    got = np.asarray(
        jax.jit(
            lambda *given: sample(given[0], sampling_of(words), positions, "full", lambda: given[1], given[2])
        )(logits, counts, mask)
    )
    alone = np.asarray(compiled("sample")(logits, *stacked(plain)))  # type: ignore[operator]
    others = [0, 1, 2, 4, 5, 6]
    assert got[others].tolist() == alone[others].tolist()
    if use in ("top_k", "top_p", "min_p"):
        assert got[3] == 7
    elif use != "nothing":
        assert got[3] != 7


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_log_probabilities_are_worked_out_where_a_row_wants_them(logprobs: int | None) -> None:
    logits = logits_for(["normal"] * ROWS, seed=3)
    words, _ = stacked([GREEDY_ROW] * (ROWS - 1) + [Row(SamplingParams(logprobs=logprobs))])
    tokens = jnp.arange(ROWS, dtype=jnp.int32)
    wanted, got = (
        with_logprobs(logits, tokens),
        jax.jit(with_wanted_logprobs)(logits, tokens, sampling_of(words)),
    )
    chosen, top = logprobs is not None, bool(logprobs)
    assert got.tokens.tolist() == tokens.tolist()
    assert got.ranks.tolist() == (wanted.ranks.tolist() if chosen else [0] * ROWS)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs if chosen else np.zeros(ROWS), rtol=1e-6)
    np.testing.assert_allclose(
        got.top_logprobs, wanted.top_logprobs if top else np.zeros((ROWS, MAX_LOGPROBS)), rtol=1e-6
    )
    assert got.top_ids.tolist() == (wanted.top_ids if top else np.zeros((ROWS, MAX_LOGPROBS), int)).tolist()


def full_sampler(logits: jax.Array, counts: jax.Array, words: jax.Array, positions: jax.Array) -> object:
    mask, sampling = jnp.full((ROWS, mask_words(VOCAB)), ALL_ALLOWED), sampling_of(words)
    return with_wanted_logprobs(
        logits, sample(logits, sampling, positions, "full", lambda: counts, mask), sampling
    )


def test_a_cpu_skips_what_no_row_uses() -> None:
    arrays = (
        np.zeros((ROWS, VOCAB), np.float32),
        np.zeros((ROWS, VOCAB), np.int32),
        *stacked([GREEDY_ROW] * ROWS),
    )
    text = jax.jit(full_sampler).lower(*arrays).compile().as_text()
    assert text is not None and " conditional(" in text
