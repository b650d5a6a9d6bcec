"""Requests whose completions are given, to score them as a rollout would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_whole
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.engine.limits import Limits

TokenIds = Sequence[int]
TokenLists = Sequence[TokenIds]


def given_requests(
    prompts: TokenLists,
    completions: TokenLists,
    limits: Limits,
    mode: str,
    make: Callable[[list[int], SamplingParams], list[Request]],
) -> list[list[Request]]:
    """The requests of score_tokens.

    Args:
        mode: the engine's logprobs_mode.
        make: creates and validates a prompt's requests.

    Raises:
        InvalidArgument: see there.
    """
    from jengine.text.masks import GivenTokens  # imports llguidance, which a start does not need

    if len(prompts) != len(completions):
        raise InvalidArgument("completions", f"{len(completions)} completions", f"must be {len(prompts)}")
    if mode != "raw_logprobs":
        limit = "must be raw_logprobs to score: with it, a token that is given has probability 1"
        raise InvalidArgument("logprobs_mode", mode, limit)
    work, longest = [], limits.sequence.max_model_len
    for prompt, completion in zip(prompts, completions, strict=True):
        if not len(completion):
            raise InvalidArgument("completions", completion, "each must have at least one token")
        for token in completion:
            check_whole("completions", token, 0, limits.vocab_size - 1)
        if len(prompt) + len(completion) > longest:
            limit = f"at most max_model_len = {longest} with their prompts"
            raise InvalidArgument("completions", f"{len(completion)} tokens", limit)
        count = len(completion)
        params = SamplingParams(
            temperature=0.0, logprobs=0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        [request] = make([*prompt], params)
        request.mask = GivenTokens([*completion])
        work.append([request])
    return work


def logprobs_of(completion: TokenIds, output: RequestOutput) -> list[float]:
    """Each token's log probability.

    Raises:
        JengineError: the request was aborted.
    """
    output.require_answer("log probabilities")
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return [entry[token].logprob for token, entry in zip(completion, logprobs, strict=True)]
