"""Requests whose completions are given, to score them as a rollout would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from jengine.api.backend import Backend
from jengine.api.prompts import PreparedPrompt
from jengine.api.request_handle import RequestHandle
from jengine.base.checks import check_whole
from jengine.base.errors import InvalidArgument
from jengine.core.request import Request, RequestOutput, SamplingParams
from jengine.engine.limits import Limits
from jengine.text.stop_strings import StopAutomaton

if TYPE_CHECKING:  # an AsyncLLM over a remote engine needs no jax
    from jengine.engine.setup.started import Started

TokenIds = Sequence[int]
TokenLists = Sequence[TokenIds]


class Scorer(Protocol):
    """What scoring needs of an AsyncLLM."""

    backend: Backend
    started: Started

    def prepare(self, prompt: Any, sampling_params: Any = None) -> PreparedPrompt: ...
    def submit(self, prompt: Any, /, *, output_kind: Any) -> RequestHandle: ...


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
    work, most = [], limits.sequence.max_model_len
    for prompt, completion in zip(prompts, completions, strict=True):
        if not len(completion):
            raise InvalidArgument("completions", completion, "each must have at least one token")
        for token in completion:
            check_whole("completions", token, 0, limits.vocab_size - 1)
        if len(prompt) + len(completion) > most:
            limit = f"at most max_model_len = {most} with their prompts"
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
    [one] = output.outputs
    output.require_answer("log probabilities")
    found = one.logprobs
    assert found is not None
    return [entry[token].logprob for token, entry in zip(completion, found, strict=True)]


async def scores(llm: Scorer, prompts: TokenLists, completions: TokenLists) -> list[list[float]]:
    """AsyncLLM.score_tokens.

    Raises:
        InvalidArgument, JengineError, EngineDead: see LLM.score_tokens.
    """
    if llm.backend.makes_masks:  # which cannot be sent
        raise InvalidArgument("engine", "in another process", "does not score tokens")
    limits, mode = llm.backend.limits, llm.started.logprobs_mode
    work = given_requests(prompts, completions, limits, mode, lambda *one: llm.prepare(*one).requests)
    with ExitStack() as stack:
        handles = []
        for requests in work:
            handles.append(llm.submit(PreparedPrompt(requests, StopAutomaton(())), output_kind="final"))
            stack.callback(handles[-1].close)
        outputs = [await anext(handle) for handle in handles]
    return [*map(logprobs_of, completions, outputs)]
