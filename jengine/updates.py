"""What an engine says as it runs. Plain data, free of jax: it crosses threads and processes."""

from __future__ import annotations

from typing import NamedTuple

from jengine.request import FinishReason


class TokenLogprobs(NamedTuple):
    """Log probabilities of raw logits, natural logarithm: of the token, its rank from 1, and (id, value) of the likeliest."""

    chosen: float
    rank: int
    top: list[tuple[int, float]]


class TokenUpdate(NamedTuple):
    """A request's next token, and why it is the last one, if it is. `scheduled` is when the request first ran, in seconds, monotonic;
    0 where that is not known."""

    request_id: str
    token: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    preemptions: int = 0
    scheduled: float = 0.0


class PromptScores(NamedTuple):
    """Log probabilities of consecutive tokens of a request's prompt, the first of them at `position`."""

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Ended(NamedTuple):
    """A request that has ended without a further token, and why."""

    request_id: str
    reason: FinishReason
    stop_reason: str | None


Update = TokenUpdate | PromptScores | Ended


class Load(NamedTuple):
    """How busy an engine is.

    Attributes:
        running, waiting: requests.
        free_pages, pages: of the cache, the null page not counted.
        preemptions, compiles_since_start: since it started; a compilation is a bug.
    """

    running: int
    waiting: int
    free_pages: int
    pages: int
    preemptions: int
    compiles_since_start: int
