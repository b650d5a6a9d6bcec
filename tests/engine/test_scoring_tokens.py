"""Scores of given completions equal the log probabilities of the rollout that made them, to the last bit."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jengine import LLM, AsyncLLM, InvalidArgument, JengineError, SamplingParams
from jengine.text.masks import GivenTokens
from tests.engine.on_demand import on_demand
from tests.engine.running import SMALL

OPTIONS: dict[str, Any] = {**SMALL, "max_model_len": 192, "batch_invariant": True, "tile_size": 16}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, text_model: Path) -> Iterator[LLM]:
    with (
        on_demand(optimized=True),
        LLM(text_model, progress=False, dtype=request.param, **OPTIONS) as llm,
    ):
        yield llm


def rollout(llm: LLM) -> tuple[list[list[int]], list[list[int]], list[list[float]]]:
    """Sampled completions, several of each prompt, and end-of-sequence tokens among them."""
    rng, vocab = np.random.default_rng(0), llm.engine.model.vocab_size
    prompts = [rng.integers(0, vocab, int(length)).tolist() for length in (1, 17, 40, 90)]
    params = SamplingParams(n=2, temperature=1.5, seed=5, max_tokens=20, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    each, completions, logprobs = [], [], []
    for output in outputs:
        for one in output.outputs:
            each.append(output.prompt_token_ids)
            completions.append(one.token_ids)
            assert one.logprobs is not None
            pairs = zip(one.token_ids, one.logprobs, strict=True)
            logprobs.append([entry[token].logprob for token, entry in pairs])
    return each, completions, logprobs


def test_scores_equal_the_rollout_to_the_last_bit(llm: LLM) -> None:
    """In the batch of the rollout, and alone; scoring as prompts is close."""
    prompts, completions, logprobs = rollout(llm)
    assert llm.score_tokens(prompts, completions) == logprobs
    assert llm.score_tokens(prompts[4:5], completions[4:5]) == logprobs[4:5]
    whole = [{"prompt_token_ids": [*a, *b]} for a, b in zip(prompts, completions, strict=True)]
    scored = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    for output, completion, expected in zip(scored, completions, logprobs, strict=True):
        assert output.prompt_logprobs is not None
        entries = zip(completion, output.prompt_logprobs[-len(completion) :], strict=True)
        found = [entry[token].logprob for token, entry in entries if entry is not None]
        np.testing.assert_allclose(found, expected, atol=0.2)


def test_what_cannot_be_scored_is_named(llm: LLM) -> None:
    for completions, message in (
        ([], "completions='0 completions': must be 1"),
        ([[]], "each must have at least one token"),
        ([[10**6]], "completions=1000000: must be a whole number, at least 0"),
        ([[3] * 192], "at most max_model_len = 192 with their prompts"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            llm.score_tokens([[1]], completions)


def test_an_async_engine_scores_too(text_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(text_model, progress=False, dtype="float32", **OPTIONS) as llm:
            params = SamplingParams(temperature=1.5, seed=5, max_tokens=12, logprobs=0, ignore_eos=True)
            prompts, completions, logprobs = [[1], [5, 6, 7, 8]], [], []
            for prompt in prompts:
                one = [output async for output in llm.generate(prompt, params)][-1].outputs[0]
                assert one.logprobs is not None
                pairs = zip(one.token_ids, one.logprobs, strict=True)
                completions.append(one.token_ids)
                logprobs.append([entry[token].logprob for token, entry in pairs])
            assert await llm.score_tokens(prompts, completions) == logprobs
            with pytest.raises(InvalidArgument, match="completions='1 completions': must be 2"):
                await llm.score_tokens(prompts, completions[:1])

            await llm.pause("keep")
            scoring = asyncio.create_task(llm.score_tokens(prompts, completions))
            await asyncio.sleep(0)  # it has queued its requests
            await llm.close()
            with pytest.raises(JengineError, match="finish_reason 'abort': shutdown"):
                await scoring

    with on_demand(optimized=True):
        asyncio.run(main())


def test_an_engine_in_another_process_does_not_score() -> None:
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.backend = SimpleNamespace(makes_masks=True)  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="engine='in another process'"):
        asyncio.run(llm.score_tokens([[1]], [[2]]))


def test_given_tokens_are_the_only_ones_allowed() -> None:
    mask = GivenTokens([3, 40])
    other = copy.copy(mask)

    def allowed(mask: GivenTokens) -> list[int]:
        words = np.full(2, 2**32 - 1, np.uint32)
        mask.fill(words)
        return [token for token in range(64) if words[token // 32] >> np.uint32(token % 32) & 1]

    assert allowed(mask) == [3] and mask.forced() == [3, 40]
    mask.accept(3)
    assert allowed(mask) == [40] and mask.forced() == [40] and allowed(other) == [3]
    mask.accept(40)
    assert len(allowed(mask)) == 64 and mask.forced() == []
    mask.rollback(2)
    assert allowed(mask) == [3]
