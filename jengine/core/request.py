"""Sampling parameters, requests and outputs: plain data, validated once, on construction."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from jengine.base.display import answer_html, counted, short
from jengine.base.errors import InvalidArgument, JengineError
from jengine.base.options import check_number, check_options, check_text, check_whole, number, one_of, whole
from jengine.core.beam_params import BeamSearchParams
from jengine.core.pooling import PoolingParams
from jengine.core.structured_outputs import StructuredOutputs, structured
from jengine.core.weights import Version
from jengine.vllm.translate import SAMPLING_SETTINGS, takes, translated, warn

if TYPE_CHECKING:
    import numpy as np

    from jengine.core.images import PromptImages

DEVICE_STOPS = 32  # the width of a slot's list on the device of tokens that min_tokens suppresses
# with more stop tokens than these, min_tokens needs a mask; the rest of the list is for end-of-sequence
# tokens
MASKED_STOPS = 16
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 2**18  # the size of the largest vocabularies
MAX_TEXTS = 256  # strings in `stop`, and in `bad_words`
MAX_TEXTS_CHARACTERS = 10_000  # in each of these two lists
MAX_CACHE_SALT = 256  # characters
MAX_ENTRIES = {
    "stop": MAX_TEXTS,
    "bad_words": MAX_TEXTS,
    "stop_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
}
FLOAT32_MAX = 3.4e38
OUTPUT_KINDS = ("cumulative", "delta", "final")
FinishReason = Literal["stop", "length", "abort", "error"]


def check_entries(name: str, count: int) -> None:
    """Check the length of a list in the sampling parameters, before its entries are copied or inspected.

    Raises:
        InvalidArgument: more than MAX_ENTRIES allows.
    """
    if name in MAX_ENTRIES and count > MAX_ENTRIES[name]:
        raise InvalidArgument(name, f"{count} entries", f"at most {MAX_ENTRIES[name]}")


def _several(name: str, value: object) -> list[Any] | tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidArgument(name, value, "must be a list")
    check_entries(name, len(value))
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Check a list of texts, and remove duplicates."""
    texts = _several(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(name, text, "each must be a string of at least one character")
    if (size := sum(map(len, texts))) > MAX_TEXTS_CHARACTERS:
        raise InvalidArgument(
            name, f"{size} characters", f"at most {MAX_TEXTS_CHARACTERS} characters together"
        )
    return tuple(dict.fromkeys(texts))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """Check a list of token ids, and remove duplicates."""
    ids = _several(name, value)
    # a Python loop would take ten times as long
    if not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        for token in ids:
            check_whole(name, token, 0, None)
    return tuple(dict.fromkeys(ids))


def stop_texts(name: str, value: object) -> tuple[str, ...]:
    return _texts(name, (value,) if isinstance(value, str) else value)


def token_biases(name: str, value: object) -> dict[int, float]:
    """Checks logit_bias. Keys of JSON are text."""
    if not isinstance(value, dict):
        raise InvalidArgument(name, value, f"must be a dict of at most {MAX_LOGIT_BIAS} token ids")
    check_entries(name, len(value))
    biases = {
        int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token: bias
        for token, bias in value.items()
    }
    for token, bias in biases.items():
        check_whole(name, token, 0, None)
        check_number(name, bias, -FLOAT32_MAX, FLOAT32_MAX, "finite")
    return biases


def allowed_ids(name: str, value: object) -> tuple[int, ...]:
    if not (ids := _token_ids(name, value)):
        raise InvalidArgument(name, ids, "must hold at least one id")
    return ids


def as_structured(name: str, value: object) -> StructuredOutputs:
    outputs = structured(value) if isinstance(value, dict) else value
    if not isinstance(outputs, StructuredOutputs):
        raise InvalidArgument(name, value, "must be a StructuredOutputs")
    return outputs


def as_seed(name: str, value: Any) -> int | None:
    """None for the two numbers that have the same 64 bits as -1."""
    if value in (-1, 2**64 - 1):
        return None
    check_whole(name, value, -(2**63), 2**64 - 1)
    return int(value)


def token_budget(name: str, value: Any) -> int | None:
    if value == -1:
        return None
    check_whole(name, value, 0, None)
    return int(value)


at_least_0 = number("a finite number, at least 0")
penalty = number("in [-2, 2]", -2.0, 2.0)


@takes(SAMPLING_SETTINGS, "sampling parameter")
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names and meanings follow vLLM.

    Lists have a maximum length, which is checked before duplicates are removed.

    Args:
        n: completions of the prompt, at most MAX_SAMPLES, each sampled independently. Must be 1 if
            temperature is 0, as in vLLM. The prompt is computed once and its cache pages are shared; each
            completion counts towards max_num_seqs.
        temperature: divides the logits; 0 selects the likeliest token (greedy decoding).
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens until their total probability reaches this; in (0, 1].
        min_p: drop tokens whose probability is below this times that of the likeliest token; in [0, 1].
        seed: a 64-bit number. With the same seed, a prompt gets the same random numbers in every batch; other
            prompts get others. By default, and with -1, each request gets one drawn with the engine's seed.
        max_tokens: the most tokens to generate; None: up to the model's length.
        min_tokens: the fewest tokens to generate. End-of-sequence and stop tokens are not sampled before,
            unless structured_outputs is complete and nothing may follow it.
        ignore_eos: continue after the model's end-of-sequence token.
        stop: strings that end the output. The text ends before the string. At most MAX_TEXTS strings, with
            MAX_TEXTS_CHARACTERS characters in total.
        stop_token_ids: tokens that end the output; at most MAX_ALLOWED_TOKEN_IDS.
        repetition_penalty: above 1, tokens that occur in the prompt or the output become less likely; below
            1, likelier. Must be above 0.
        presence_penalty: subtracted from the logits of tokens that occur in the output; in [-2, 2].
        frequency_penalty: subtracted from the logits of tokens in the output, once for each occurrence; in
            [-2, 2].
        logit_bias: token ids and the values to add to their logits; at most MAX_LOGIT_BIAS.
        allowed_token_ids: the only tokens that may be sampled; at most MAX_ALLOWED_TOKEN_IDS.
        bad_words: texts that must not occur in the output: a token that would complete one is not sampled. At
            most MAX_TEXTS texts, with MAX_TEXTS_CHARACTERS characters in total, none of white space only.
        structured_outputs: a constraint on the output: an object with exactly one of the fields json, regex,
            choice and grammar, such as {"regex": "[0-9]+"}. In Python, also a StructuredOutputs.
        thinking_token_budget: for a model that thinks between <think> and </think>, the most tokens of a
            thought; after that, its end is forced. By default, and with -1, there is no limit.
        include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
        skip_special_tokens: omit special tokens from the text.
        detokenize: turn tokens into text. Stop strings need it.
        logprobs: return, for each output token, its log probability and those of this many likeliest tokens;
            0 returns the token's own only. Computed from the raw logits, unless the engine's logprobs_mode
            says otherwise. At most MAX_LOGPROBS; by default none.
        prompt_logprobs: the same for each token of the prompt except the first. Such a request computes its
            whole prompt: it does not use the prefix cache.
        output_kind: of AsyncLLM's outputs, one of OUTPUT_KINDS; see RequestOptions. It is not compared.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    n: Annotated[int, whole(1, MAX_SAMPLES)] = 1
    temperature: Annotated[float, at_least_0] = 1.0
    top_k: Annotated[int, whole(-1)] = 0
    top_p: Annotated[float, number("in (0, 1]", 0.0, 1.0, open_low=True)] = 1.0
    min_p: Annotated[float, number("in [0, 1]", 0.0, 1.0)] = 0.0
    seed: Annotated[int | None, as_seed] = None
    max_tokens: Annotated[int | None, whole(1)] = 16
    min_tokens: Annotated[int, whole(0)] = 0
    ignore_eos: bool = False
    stop: Annotated[str | list[str] | tuple[str, ...], stop_texts] = ()
    stop_token_ids: Annotated[list[int] | tuple[int, ...], _token_ids] = ()
    repetition_penalty: Annotated[float, number("a finite number above 0", open_low=True)] = 1.0
    presence_penalty: Annotated[float, penalty] = 0.0
    frequency_penalty: Annotated[float, penalty] = 0.0
    logit_bias: Annotated[dict[int, float] | None, token_biases] = None
    allowed_token_ids: Annotated[list[int] | tuple[int, ...] | None, allowed_ids] = None
    bad_words: Annotated[list[str] | tuple[str, ...], _texts] = ()
    structured_outputs: Annotated[StructuredOutputs | dict[str, Any] | None, as_structured] = None
    thinking_token_budget: Annotated[int | None, token_budget] = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    output_kind: Annotated[str | None, one_of(OUTPUT_KINDS)] = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.n > 1 and self.greedy:
            limit = "must be 1 if temperature is 0: greedy completions would all be the same"
            raise InvalidArgument("n", self.n, limit)
        if self.min_tokens:
            check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.stop and not self.detokenize:
            raise InvalidArgument("detokenize", False, "must be True if stop strings are given")

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed. Raises as the constructor does."""
        known = type(self).__dataclass_fields__
        fields, notes = translated(changes, known, SAMPLING_SETTINGS, "sampling parameter")
        warn(notes)
        return replace(self, **fields)

    @property
    def penalizes(self) -> bool:
        """Whether tokens must be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def masks(self) -> bool:
        """Whether a token mask must be computed on the host."""
        return (
            self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.structured_outputs is not None
            or self.thinking_token_budget is not None
            or self.many_stops
        )

    @property
    def many_stops(self) -> bool:
        """Whether min_tokens suppresses more stop tokens than a slot's list on the device has room for."""
        return self.min_tokens > 0 and len(self.stop_token_ids) > MASKED_STOPS

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0


def check_cache_salt(salt: object) -> None:
    """Raises InvalidArgument unless this is None, or text of 1 to MAX_CACHE_SALT characters."""
    if salt is not None:
        check_text("cache_salt", salt, 1, MAX_CACHE_SALT)


class TokenMask(Protocol):
    """Decides on the host which tokens may come next, one token after the other."""

    def fill(self, words: np.ndarray) -> None:
        """Clear the bits of forbidden tokens. Token t is bit t % 32 of words[t // 32], uint32."""

    def accept(self, token: int) -> None:
        """Record the token that was sampled, or that may be sampled next."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, at most MOST_DRAFTS."""

    def forced(self) -> list[int]:
        """Tokens that will probably come next, as far as is known without computing anything: drafts."""
        return []

    def free(self) -> int:
        """How many of the next tokens need no mask, at least."""
        return 0

    def is_complete(self) -> bool:
        """Whether a grammar allowed the output to end, at the last `fill`."""
        return False


@dataclass(slots=True, kw_only=True)
class Request:
    """One completion of a prompt inside the engine. Each of the n completions is a separate request.

    Attributes:
        cache_salt: requests share cached pages only if they have the same salt, or if neither has one.
        pooling: set if the request asks for an embedding; its sampling parameters are then POOLED.
        beams: set if the request asks for a beam search; its sampling parameters are then those of
            beams.sampling_of, with as many log probabilities as are returned.
        lora_name: the loaded adapter that it uses; None: the model alone.
        images: the prompt's images, if it has any.
        pages_from: host:port of an engine that has computed the prompt, and serves its pages. They are then
            used whatever their transfer costs.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    sample_index: int = 0  # index among a prompt's n samples
    mask: TokenMask | None = None  # constraints that programs do not apply
    priority: int = 0  # lower runs first, under policy="priority"
    arrival: float = 0.0  # seconds, monotonic
    cache_salt: str | None = None
    ttft_ms: float | None = None  # targets; None: the engine's
    tpot_ms: float | None = None
    client: str = ""  # the client whose share of the engine it uses, under policy="fair"
    pooling: PoolingParams | None = None
    beams: BeamSearchParams | None = None
    lora_name: str | None = None
    images: PromptImages | None = None
    pages_from: str | None = None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability (natural logarithm), its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt: its text and tokens so far, and why it ended."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it, or the error
    # where weights changed: the index of the first token that each version made, and the version
    weights_versions: list[tuple[int, Version]] = field(default_factory=list)

    @property
    def weights_version(self) -> Version | None:
        """The weights' version for the last token; None before the first. See `LLM.update_weights`."""
        return self.weights_versions[-1][1] if self.weights_versions else None

    def __repr__(self) -> str:
        return f"CompletionOutput({short(self.text)}, {self._note()})"

    def _note(self) -> str:
        ended = "unfinished" if self.finish_reason is None else f"finish_reason={self.finish_reason!r}"
        because = "" if self.stop_reason is None else f", stop_reason={self.stop_reason!r}"
        return f"{counted(len(self.token_ids), 'token')}, {ended}{because}"


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When a request was queued, started and finished, by time.monotonic(), and its preemptions."""

    arrival: float = 0.0
    scheduled: float | None = None  # first; known with the first token
    first_token: float | None = None  # of any completion
    finished: float | None = None  # the last of them
    preemptions: int = 0  # of all of them together


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's output so far: `outputs` are its n completions, by index. It is finished when all of them
    are.

    Attributes:
        num_cached_tokens: prompt tokens that the first completion took from the prefix cache; None before the
            first token.
        embedding: float32 [dimensions], if the request asked for one and has finished; its completion stays
            empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first token
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int | None = None
    embedding: np.ndarray | None = None

    def require_answer(self, what: str = "an answer") -> None:
        """Raises JengineError if a completion has ended with an error, or was aborted."""
        for ended in self.outputs:
            if ended.finish_reason in ("abort", "error"):
                why = "" if ended.stop_reason is None else f": {ended.stop_reason}"
                raise JengineError(
                    f"the request ended without {what}, with finish_reason {ended.finish_reason!r}{why}"
                )

    def __repr__(self) -> str:
        prompt = f"prompt={short(self.prompt)}, {counted(len(self.prompt_token_ids), 'prompt token')}"
        return (
            f"RequestOutput({self.request_id!r}, {prompt}, finished={self.finished},"
            f" outputs={self.outputs!r})"
        )

    def _repr_html_(self) -> str:
        prompt = f"[{counted(len(self.prompt_token_ids), 'token')}] " if self.prompt is None else self.prompt
        return answer_html(prompt, [(completion.text, completion._note()) for completion in self.outputs])


def prompt_seed(seed: int, prompt_token_ids: Sequence[int]) -> int:
    """Derives a 64-bit seed from a request's own seed, from -2**63 to 2**64 - 1, and its prompt.

    So with one seeded SamplingParams, different prompts get different noise, and equal prompts the same,
    wherever they are in a list. A seed is equivalent to its value modulo 2**64.
    """
    content = (seed % 2**64).to_bytes(8, "little") + array("i", prompt_token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
