"""What an engine says as it runs. Plain data, free of jax: it crosses threads and processes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from jengine.request import FinishReason


class TokenLogprobs(NamedTuple):
    """Log probabilities of raw logits, natural logarithm: of the token, its rank from 1, and (id, value) of the likeliest."""

    chosen: float
    rank: int
    top: list[tuple[int, float]]


class Found(NamedTuple):
    """What a sampler found at a position: a token, and log probabilities of it and of the likeliest ones."""

    token: int
    logprobs: TokenLogprobs


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's next token. A step makes hundreds, hence a struct: a named tuple takes five times as long to make.

    Attributes:
        finish_reason, stop_reason: why it is the last one, if it is.
        scheduled: when the request first ran, in seconds, monotonic; 0 where that is not known.
        cached: tokens of its prompt whose keys and values the request did not compute: found in the prefix cache when it first ran, or
            computed by a sample of the same prompt.
    """

    request_id: str
    token: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0


class PromptScores(NamedTuple):
    """Log probabilities of consecutive tokens of a request's prompt, the first of them at `position`."""

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Pooled(NamedTuple):
    """A request's embedding, with which it ends: float32 numbers in the machine's byte order. The other fields as TokenUpdate's."""

    request_id: str
    embedding: bytes
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0


class Beam(NamedTuple):
    """One result of a beam search.

    Attributes:
        tokens: of the output.
        cumulative: their log probability.
        found: at each position, where it was asked for.
    """

    tokens: list[int]
    cumulative: float
    finish_reason: FinishReason
    found: list[Found] | None = None


class BeamsFound(NamedTuple):
    """A request's beams, the best first, with which it ends. The other fields as TokenUpdate's."""

    request_id: str
    beams: list[Beam]
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0


class Ended(NamedTuple):
    """A request that has ended without a further token, and why."""

    request_id: str
    reason: FinishReason
    stop_reason: str | None


Update = TokenUpdate | PromptScores | Pooled | BeamsFound | Ended


class Load(NamedTuple):
    """How busy an engine is.

    Attributes:
        running, waiting: requests.
        free_pages, pages: of the cache, the null page not counted.
        preemptions, compiles_since_start: since it started; a compilation is a bug.
        cached_pages: free pages that can still be found by a prompt.
        prefix_queries, prefix_hits: prompt tokens that were looked up in the prefix cache since the start, and those found.
        hit_pages: pages found since the start, by cache group.
        cache_groups: their names, such as "full" or "window[512]".
        evictions: cached pages that were given to other tokens since the start.
        host_pages, host_used: pages of the host's memory, and those that are not free; 0 without swap_space.
        host_queries, host_hits: prompt tokens that the device had not, looked up on the host since the start, and those fetched from there.
        host_declined: those that were there and computed again, since that was predicted to be faster.
        host_spilled, host_fetched: pages copied to the host since the start, and back.
        host_evictions: pages on the host that were given to other tokens since the start.
        resumptions: preempted sequences that run again, by where their pages were: still on the device, on the host, nowhere.
        programs_ready, programs: of the table, those that steps can use so far, and all.
        strategy: in use.
        decisions: steps with prompts, by strategy and the reason for their size, since the start.
        targets_met, targets_missed: requests with ttft_ms or tpot_ms that ended by themselves, since the start.
        targets_rejected: those that were rejected.
        first_token_seconds: until a request like those that came of late would get its first token, if it came now; at most a second old.
    """

    running: int
    waiting: int
    free_pages: int
    pages: int
    preemptions: int
    compiles_since_start: int
    cached_pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    hit_pages: tuple[int, ...] = ()
    cache_groups: tuple[str, ...] = ()
    evictions: int = 0
    programs_ready: int = 0
    programs: int = 0
    strategy: str = "throughput"
    decisions: tuple[tuple[str, int], ...] = ()
    targets_met: int = 0
    targets_missed: int = 0
    targets_rejected: int = 0
    first_token_seconds: float = 0.0
    host_pages: int = 0
    host_used: int = 0
    host_queries: int = 0
    host_hits: int = 0
    host_declined: int = 0
    host_spilled: int = 0
    host_fetched: int = 0
    host_evictions: int = 0
    resumptions: tuple[int, int, int] = (0, 0, 0)
