"""Log probabilities of the raw logits, or of the distribution that tokens are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jengine import EngineConfig, InvalidArgument, SamplingParams
from jengine.engine.loop.engine import Engine
from tests.engine.running import run

PROMPT = [5, 6, 7, 8, 9]
HOW: dict[str, Any] = {"logprobs": 20, "max_tokens": 2, "ignore_eos": True, "seed": 3}
# the processed distribution from the raw log probabilities of all tokens
CASES: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "temperature": ({"temperature": 0.5}, lambda raw: raw / 0.5),
    "greedy": ({"temperature": 0.0, "min_p": 0.9}, lambda raw: raw),
    "top_k": (
        {"temperature": 2.0, "top_k": 5},
        lambda raw: np.where(raw >= np.sort(raw)[-5], raw / 2, -np.inf),
    ),
    "allowed": (
        {"allowed_token_ids": [3, 4, 5, 6]},
        lambda raw: np.where(np.isin(np.arange(len(raw)), [3, 4, 5, 6]), raw, -np.inf),
    ),
    "bias": ({"logit_bias": {9: 3.0}}, lambda raw: raw + 3.0 * (np.arange(len(raw)) == 9)),
}


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., Engine]) -> tuple[Engine, Engine]:
    return make_engine(), make_engine(logprobs_mode="processed_logprobs")


def test_processed_ones_are_those_of_the_distribution(engines: tuple[Engine, Engine]) -> None:
    """All cases in one batch, so that rows share steps. Tokens do not depend on the mode."""
    work = [(PROMPT, SamplingParams(**{**HOW, **how})) for how, _ in CASES.values()]
    raw, processed = (run(engine, work) for engine in engines)
    assert [answer.tokens for answer in raw] == [answer.tokens for answer in processed]
    for (_, process), one, other in zip(CASES.values(), raw, processed, strict=True):
        for before, after in zip(one.updates, other.updates, strict=True):
            assert before.logprobs is not None and after.logprobs is not None
            prompt = [*PROMPT, *one.tokens[: one.updates.index(before)]]
            expected = log_softmax(process(every(engines[0], prompt)))
            assert after.logprobs.chosen == pytest.approx(expected[after.token], abs=2e-5)
            assert after.logprobs.rank == 1 + np.sum(expected > expected[after.token] + 2e-5)
            kept = [(token, value) for token, value in after.logprobs.top if np.isfinite(value)]
            assert len(kept) == min(20, np.isfinite(expected).sum())
            for token, value in kept:
                assert value == pytest.approx(expected[token], abs=2e-5)


def every(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Raw log probabilities of all tokens after a prompt."""
    vocab = engine.model.vocab_size
    found = np.full(vocab, np.nan)
    work = [
        (prompt, SamplingParams(logprobs=0, max_tokens=1, allowed_token_ids=[token]))
        for token in range(vocab)
    ]
    for token, answer in enumerate(run(engine, work)):
        [update] = answer.updates
        assert update.token == token and update.logprobs is not None
        found[token] = update.logprobs.chosen
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return result


def test_prompts_have_raw_ones(engines: tuple[Engine, Engine]) -> None:
    params = SamplingParams(temperature=0.3, top_k=2, prompt_logprobs=2, max_tokens=1)
    raw, processed = (run(engine, [(PROMPT, params)])[0].scores for engine in engines)
    assert raw == processed


def test_other_modes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="logprobs_mode='raw_logits': must be one of raw_log"):
        EngineConfig(logprobs_mode="raw_logits")  # type: ignore[arg-type]
