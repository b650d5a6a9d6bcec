"""What a user asks and what comes back: plain data, checked once, at the door."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from jengine.errors import InvalidArgument
from jengine.program_table import Variant

MAX_STOP_TOKEN_IDS = 16  # end-of-sequence ids included: the width of a slot's stop list on the device
MAX_LOGPROBS = 20
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Names and meanings follow vLLM.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens until their mass reaches this; in (0, 1].
        min_p: drop tokens less likely than this times the likeliest; in [0, 1].
        seed: 64-bit; the same seed gives the same tokens whatever the neighbours. None draws one.
        max_tokens: tokens generated at most; None runs to the model's length.
        min_tokens: no end-of-sequence and no stop token before this many.
        ignore_eos: do not end at the model's end-of-sequence.
        stop: strings at which the text ends; the string itself is left out.
        stop_token_ids: token ids at which the output ends, at most MAX_STOP_TOKEN_IDS with end-of-sequence.
        logprobs: return this many likeliest tokens' log probabilities (of the raw logits) and the
            chosen one's at each position; 0 gives the chosen one only; None gives none.

    Raises:
        InvalidArgument: naming the field, the value and the limit.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _several("stop", stop))
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, math.inf, "a finite number, at least 0")
        _whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidArgument("ignore_eos", self.ignore_eos, "must be True or False")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgument("stop", text, "each stop must be a string of at least one character")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument("stop_token_ids", self.stop_token_ids, f"at most {MAX_STOP_TOKEN_IDS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def variant(self) -> Variant:
        """The cheapest sampler program that applies every parameter."""
        if self.logprobs is not None:
            return "logprobs"
        truncates = not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        if truncates or self.min_tokens > 0:
            return "full"
        return "greedy" if self.greedy else "sample"


def _several(name: str, value: object) -> tuple[object, ...]:
    if value is not None and not isinstance(value, list | tuple):
        raise InvalidArgument(name, value, "must be a list")
    return tuple(value or ())


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    limit = f"must be a whole number, at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidArgument(name, value, limit)


def _number(name: str, value: object, low: float, high: float, limit: str, open_low: bool = False) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high and value != math.inf
    if not fits or (open_low and value == low):
        raise InvalidArgument(name, value, f"must be {limit}")


@dataclass(slots=True, kw_only=True)
class Request:
    """One prompt on its way through the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0  # lower runs first, under policy="priority"
    arrival: float = 0.0  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log probability (natural logarithm), its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended it


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """When things happened, in seconds of time.monotonic(), and how often the request was interrupted."""

    arrival: float = 0.0
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with what has been generated for it so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
