"""Validates prompts, and converts them to requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

from jengine.api.image_prompts import FIELD, with_data
from jengine.base.errors import InvalidArgument, PromptTooLong
from jengine.core.beam_params import BeamSearchParams
from jengine.core.image_options import PROCESSING
from jengine.core.pooling import PoolingParams
from jengine.core.request import Request, SamplingParams, TokenMask, check_cache_salt
from jengine.scheduling.requests.sequence_limits import longest_prompt
from jengine.text.completion import StopAutomaton
from jengine.text.thinking import bound_thinking, check_thinking
from jengine.text.tokenizer import Tokenizer, bad_sequences

EMBEDS = "prompt_embeds"  # of a prompt, as in vLLM
LONG_TEXT = 10_000  # characters; AsyncLLM tokenizes longer texts in a thread
# parameters of embedding requests
POOLED = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


class TextPrompt(TypedDict):
    """A prompt as text. With a `cache_salt`, it shares cached pages only with prompts that have the same
    salt. `multi_modal_data` is {"image": one or a list}, for the places that the text has for images;
    `mm_processor_kwargs` says how they are resized, see EngineConfig.
    """

    prompt: str
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[dict[str, Any] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]


class TokensPrompt(TypedDict):
    """A tokenized prompt. `prompt` is its text, for display only; the rest is as in TextPrompt."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str | None]
    multi_modal_data: NotRequired[dict[str, Any] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`: a float array [tokens, hidden size],
    or a list of such arrays and of lists of token ids, in order. `cache_salt` is that of TextPrompt.
    """

    prompt_embeds: Any
    cache_salt: NotRequired[str | None]


Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A checked and tokenized prompt, to be submitted once. Made by AsyncLLM.prepare."""

    requests: list[Request]
    stops: StopAutomaton  # shared by all of them


def make_requests(
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams | None,
    request_id: str,
    masks: bool = True,
    max_model_len: int | None = None,
    pooling: PoolingParams | None = None,
    beams: BeamSearchParams | None = None,
) -> list[Request]:
    """The requests for one prompt, params.n of them; None is SamplingParams(). The first has this id, the
    others derived ids.

    Thread-safe.

    Args:
        masks: whether to create token masks, which may take seconds; otherwise the receiver of the requests
            does.
        max_model_len: longer text is rejected without tokenizing it if its length in bytes suffices to tell.
        pooling: for an embedding; there are no sampling parameters then.
        beams: for a beam search; `params` must be derived from them.

    Raises:
        InvalidArgument: invalid or empty prompt, text that is too long, an image that cannot be read, or
            invalid SamplingParams or cache_salt.
    """
    params = POOLED if pooling is not None else SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise InvalidArgument("sampling_params", params, "must be a SamplingParams")
    item: Any = prompt
    options: dict[str, Any] = item if isinstance(item, dict) else {}
    salt, data, processing = (options.get(name) for name in ("cache_salt", FIELD, PROCESSING))
    check_cache_salt(salt)
    fields = options.keys() - {"cache_salt", FIELD, PROCESSING}
    if isinstance(item, str) or fields == {"prompt"}:
        text = item if isinstance(item, str) else item["prompt"]
        if not isinstance(text, str):
            raise InvalidArgument("prompt", text, "must be text")
        if pooling is not None:
            text = text and pooling.prompt + text
        check_length(tokenizer, text, max_model_len, pooled=pooling is not None)
        # to go on from nothing, some tokenizers have a token
        ids = tokenizer.encode(text) if text or pooling is None else []
    elif fields == {EMBEDS}:
        from jengine.vision.prompt_embeddings import with_embeddings  # imports numpy, which few need

        text, (ids, embeddings) = None, with_embeddings(EMBEDS, item[EMBEDS])
        data = {"image": embeddings}
    elif {"prompt_token_ids"} <= fields <= {"prompt_token_ids", "prompt"}:
        text, ids = item.get("prompt"), item["prompt_token_ids"]
        if text is not None and not isinstance(text, str):
            raise InvalidArgument("prompt", text, "must be text, beside prompt_token_ids")
    else:
        text, ids = None, item
    if not isinstance(ids, list):
        raise InvalidArgument(
            "prompt",
            prompt,
            'must be text, a list of token ids, {"prompt": ...}, {"prompt_token_ids": [...]} or'
            ' {"prompt_embeds": array}',
        )
    if not ids:
        raise InvalidArgument("prompt", prompt, "must not be empty")
    ids, images = with_data(tokenizer, list(ids), data, processing)
    arrival = time.monotonic()
    check_thinking(params, tokenizer)
    if params.bad_words:
        bad_sequences(params.bad_words, tokenizer)  # checks them, also if the masks are made elsewhere
    fresh: Sequence[TokenMask | None] = (
        _masks(tokenizer, params, ids) if masks and params.masks else [None] * params.n
    )
    first, others = params_of_samples(params)
    return [
        Request(
            request_id=f"{request_id}/{index}" if index else request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=others if index else first,
            sample_index=index,
            mask=fresh[index],
            arrival=arrival,
            cache_salt=salt,
            pooling=pooling,
            beams=beams,
            images=images,
        )
        for index in range(params.n)
    ]


def is_slow(prompt: object) -> bool:
    """Whether others should not wait for `make_requests`: it is long text, or has images or embeddings."""
    if isinstance(prompt, dict):
        return bool(prompt.get(FIELD)) or EMBEDS in prompt
    return isinstance(prompt, str) and len(prompt) >= LONG_TEXT


def params_of_samples(params: SamplingParams) -> tuple[SamplingParams, SamplingParams]:
    """Parameters of a prompt's first request, and of the others: only the first one scores the prompt."""
    return params, params if params.prompt_logprobs is None else dataclasses.replace(
        params, prompt_logprobs=None
    )


def check_length(tokenizer: Tokenizer, text: str, max_model_len: int | None, *, pooled: bool = False) -> None:
    """Raises PromptTooLong if the text's length shows that it has too many tokens; see longest_prompt."""
    per_token = tokenizer.max_token_bytes if max_model_len is not None else None
    if max_model_len is None or per_token is None or len(text) < max_model_len:
        return
    size = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    longest, limit = longest_prompt(max_model_len, pooled=pooled)
    if (least := -(-size // per_token)) > longest:
        limit = f"{size} bytes are at least {least} tokens; {limit}"
        raise PromptTooLong("prompt", text, limit, least, max_model_len, or_more=True)


def _masks(tokenizer: Tokenizer, params: SamplingParams, prompt: list[int]) -> Sequence[TokenMask | None]:
    from jengine.text.masks import make_masks  # imported here, since only structured outputs need llguidance

    return bound_thinking(make_masks(params, tokenizer, params.n), params, tokenizer, prompt)


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a list of whole numbers is one prompt.

    Raises:
        InvalidArgument: it is neither.
    """
    # make_requests rejects bytes; iterating over them would yield numbers
    if isinstance(prompts, str | dict | bytes):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidArgument("prompts", prompts, "must be a prompt or a list of prompts")
    is_single = isinstance(prompts, list) and bool(prompts) and all(isinstance(item, int) for item in prompts)
    return [cast(list[int], prompts)] if is_single else cast(list[Prompt], list(prompts))
