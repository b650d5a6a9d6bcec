"""Expected answers in the scheduler's tests: functions of the seed and the previous tokens, without a
model.
"""

from __future__ import annotations

import random

from jengine.core.request import Request, SamplingParams
from jengine.core.updates import Beam, ScoredToken, TokenLogprobs
from tests.golden.beam_rule import beam_search

VOCAB = 50
EOS = (0,)


def next_token(
    seed: int,
    sample: int,
    tokens: list[int],
    params: SamplingParams,
    prompt_len: int,
    suppressed: tuple[int, ...],
) -> int:
    token = hash((seed, sample, *tokens)) % VOCAB
    while len(tokens) - prompt_len < params.min_tokens and token in suppressed:
        token = (token + 1) % VOCAB
    return token


def found_after(tokens: list[int], seed: int, sample: int, width: int, temperature: float) -> ScoredToken:
    """2 x width candidates, and a sampled token, which may be another one."""
    draw = random.Random(hash((seed, *tokens)))
    likely = draw.sample(range(VOCAB), 2 * width + 1)
    values = sorted([-draw.uniform(0.1, 1.0) for _ in likely], reverse=True)
    top = list(zip(likely[:-1], values[:-1], strict=True))
    if temperature and random.Random(hash((seed, sample, *tokens))).random() < 0.5:
        # more than any other has, so that it matters
        return ScoredToken(likely[-1], TokenLogprobs(-0.05, 1, top))
    return ScoredToken(likely[0], TokenLogprobs(values[0], 1, top))


def beams_alone(request: Request, seed: int, max_model_len: int) -> list[Beam]:
    """The result of a beam search that runs alone."""
    params, prompt = request.beams, request.prompt_token_ids
    assert params is not None and params.temperature == 0.0

    def candidates(beams: list[list[int]]) -> list[dict[int, float]]:
        return [dict(found_after(beam, seed, 0, params.beam_width, 0.0).logprobs.top) for beam in beams]

    steps = min(params.max_tokens, max_model_len - len(prompt))
    how = {"eos": EOS[0], "length_penalty": params.length_penalty, "ignore_eos": params.ignore_eos}
    best, _ = beam_search(prompt, candidates, width=params.beam_width, steps=steps, **how)
    return [Beam(tokens, cumulative, "stop" if ended else "length") for tokens, cumulative, ended in best]


def alone(request: Request, seed: int, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Output, finish reason and stop reason of a request that runs alone."""
    params, prompt_len = request.params, len(request.prompt_token_ids)
    tokens = list(request.prompt_token_ids)
    while True:
        token = next_token(
            seed, request.sample_index, tokens, params, prompt_len, (*params.stop_token_ids, *EOS)
        )
        tokens.append(token)
        if token in EOS and not params.ignore_eos:
            return tokens[prompt_len:], "stop", None
        if token in params.stop_token_ids:
            return tokens[prompt_len:], "stop", token
        if len(tokens) == max_model_len or len(tokens) - prompt_len == params.max_tokens:
            return tokens[prompt_len:], "length", None
