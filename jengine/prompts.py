"""Prompts as users give them, made into requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict, cast

from jengine.errors import InvalidArgument
from jengine.request import Request, SamplingParams, TokenMask
from jengine.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is tokenized already; `prompt` is its text, to be shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt


def make_requests(
    tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams | None, request_id: str, priority: int = 0, masks: bool = True
) -> list[Request]:
    """The requests for one prompt, params.n of them; None is SamplingParams(). The first has this id, the others grow theirs from it.

    Args:
        masks: make the token masks as well, which may take seconds; else whoever takes the requests must.

    Raises:
        InvalidArgument: what is no prompt, or empty; what is no SamplingParams.
    """
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidArgument("sampling_params", params, "must be a SamplingParams")
    if type(priority) is not int:
        raise InvalidArgument("priority", priority, "must be a whole number")
    given: Any = prompt
    if isinstance(given, str) or (isinstance(given, dict) and set(given) == {"prompt"}):
        text = given if isinstance(given, str) else given["prompt"]
        if not isinstance(text, str):
            raise InvalidArgument("prompt", text, "must be text")
        ids = tokenizer.encode(text) if text else []
    elif isinstance(given, dict) and {"prompt_token_ids"} <= set(given) <= {"prompt_token_ids", "prompt"}:
        text, ids = given.get("prompt"), given["prompt_token_ids"]
        if text is not None and not isinstance(text, str):
            raise InvalidArgument("prompt", text, "must be text, beside prompt_token_ids")
    else:
        text, ids = None, given
    if not isinstance(ids, list):
        raise InvalidArgument("prompt", prompt, 'must be text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}')
    if not ids:
        raise InvalidArgument("prompt", prompt, "must not be empty")
    ids, arrival = list(ids), time.monotonic()
    fresh: Sequence[TokenMask | None] = _masks(tokenizer, params) if masks and params.masks else [None] * params.n
    others = dataclasses.replace(params, prompt_logprobs=None) if params.n > 1 else params  # the prompt is scored once
    return [
        Request(
            request_id=f"{request_id}/{index}" if index else request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=others if index else params,
            sample_index=index,
            mask=fresh[index],
            priority=priority,
            arrival=arrival,
        )
        for index in range(params.n)
    ]


def _masks(tokenizer: Tokenizer, params: SamplingParams) -> Sequence[TokenMask | None]:
    from jengine.text.masks import make_masks  # llguidance is imported by those who use it

    return make_masks(params, tokenizer, params.n)


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a list of whole numbers is one prompt.

    Raises:
        InvalidArgument: neither.
    """
    if isinstance(prompts, str | dict | bytes):  # bytes are no prompt, as make_requests says; iterated, they would be numbers
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts", prompts, "must be a prompt or a list of prompts")
    one = isinstance(prompts, list) and bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [cast(list[int], prompts)] if one else cast(list[Prompt], list(prompts))
