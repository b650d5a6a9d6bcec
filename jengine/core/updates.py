"""Messages from an engine as it runs. Plain data, without jax, for other threads and processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.core.request import FinishReason
from jengine.core.weights import FIRST_VERSION, Version

UNLOADED = "unloaded"  # the stop_reason of a request whose adapter has gone
COUNTERS = (  # numbers of a Load that count since its engine's start
    "preemptions", "compiles_since_start", "report_faults", "prefix_queries", "prefix_hits", "evictions",
    "targets_met", "targets_missed", "targets_rejected", "drafts", "draft_tokens",
    "host_queries", "host_hits", "host_declined", "host_spilled", "host_fetched", "host_evictions",
)  # fmt: skip
SAME = ("cache_groups", "page_size", "strategy", "loras", "programs")  # of all replicas
LEAST = ("first_token_seconds", "programs_ready")


class TokenLogprobs(NamedTuple):
    """Log probabilities (natural logarithm), see EngineConfig.logprobs_mode: of the token, its rank from 1,
    and (id, value) of the most likely tokens.
    """

    chosen: float
    rank: int
    top: list[tuple[int, float]]


class ScoredToken(NamedTuple):
    """A sampler's result at a position: a token, and log probabilities of it and of the likeliest."""

    token: int
    logprobs: TokenLogprobs


class TokenUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's next token. A struct, since a step creates hundreds, and a named tuple takes five times as
    long to create.

    Attributes:
        finish_reason, stop_reason: set if it is the last one.
        scheduled: monotonic seconds at which the request first ran; 0 if unknown.
        cached: prompt tokens that the request did not compute: found in the prefix cache when it first ran,
            or computed by another sample of the same prompt.
        version: of the weights that made the token.
    """

    request_id: str
    token: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: TokenLogprobs | None = None
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0
    version: Version = FIRST_VERSION


class PromptScores(NamedTuple):
    """Log probabilities of consecutive tokens of a request's prompt, the first of them at `position`."""

    request_id: str
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Pooled(NamedTuple):
    """A request's embedding, which ends it: float32 numbers in native byte order. The other fields are as in
    TokenUpdate."""

    request_id: str
    embedding: bytes
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0
    version: Version = FIRST_VERSION


class Beam(NamedTuple):
    """One result of a beam search.

    Attributes:
        tokens: output tokens.
        cumulative: their cumulative log probability.
        found: candidates at each position, if requested.
    """

    tokens: list[int]
    cumulative: float
    finish_reason: FinishReason
    found: list[ScoredToken] | None = None


class BeamsFound(NamedTuple):
    """A request's beams, the best first, which end it. The other fields are as in TokenUpdate."""

    request_id: str
    beams: list[Beam]
    preemptions: int = 0
    scheduled: float = 0.0
    cached: int = 0
    version: Version = FIRST_VERSION


class Ended(NamedTuple):
    """A request that has ended without a further token, with its reasons."""

    request_id: str
    reason: FinishReason
    stop_reason: str | None

    @classmethod
    def of_refused(cls, request_id: str, error: Exception) -> Ended:
        """The end of a valid request that the engine refuses: its adapter was unloaded, or a fault."""
        if isinstance(error, InvalidArgument) and error.field == "lora_request":
            return cls(request_id, "abort", UNLOADED)
        return cls(request_id, "error", str(error))


Update = TokenUpdate | PromptScores | Pooled | BeamsFound | Ended


class LoraLoad(NamedTuple):
    """Use of an engine's adapters.

    Attributes:
        max_loras: places on the devices.
        loaded: adapters in host memory.
        running, waiting: names of those that running and waiting requests use, sorted.
    """

    max_loras: int
    loaded: int = 0
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class StoreLoad(NamedTuple):
    """What an engine and a store of pages have done since the start; see EngineConfig.kv_transfer_config.

    Attributes:
        connector: the kind of store.
        queries, hits: pages of prompts that were looked up, and loaded.
        declined: pages that were found but computed, since that was predicted to be faster.
        late: prompts that waited as long as they may, and were computed.
        loaded_bytes, loading_seconds: of the pages loaded.
        kept, kept_bytes: pages given to the store.
        dropped: pages that the store had no room for, or that came faster than it takes them.
        failures: of the store.
    """

    connector: str
    queries: int = 0
    hits: int = 0
    declined: int = 0
    late: int = 0
    loaded_bytes: int = 0
    loading_seconds: float = 0.0
    kept: int = 0
    kept_bytes: int = 0
    dropped: int = 0
    failures: int = 0

    def plus(self, other: StoreLoad) -> StoreLoad:
        """The sums of both."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in self._fields[1:]}
        return self._replace(**sums)


class Load(NamedTuple):
    """Current load of an engine.

    Attributes:
        running, waiting: numbers of requests.
        free_pages, pages: pages in the cache, without the null page.
        preemptions, compiles_since_start: counts since the start; each compilation is a bug.
        cached_pages: free pages that a prompt can still find.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache since the start, and found.
        hit_pages: pages found since the start, by cache group.
        cache_groups: names of the groups, such as "full" or "window[512]".
        evictions: cached pages reused for other tokens since the start.
        host_pages, host_used: pages of host memory, and those in use; 0 without swap_space.
        host_queries, host_hits: prompt tokens that were not on the device and were looked up on the host
            since the start, and those fetched from there.
        host_declined: prompt tokens found on the host but computed again, since that was predicted to be
            faster.
        host_spilled, host_fetched: pages copied to the host since the start, and back.
        host_evictions: host pages reused for other tokens since the start.
        resumptions: preempted sequences that resumed with pages still on the device, with pages from the
            host, and with none.
        programs_ready, programs: programs that steps can use so far, and all programs of the table.
        strategy: the strategy in use.
        decisions: steps with prompts since the start, by strategy and the reason for their size.
        targets_met, targets_missed: requests with ttft_ms or tpot_ms that finished since the start.
        targets_rejected: requests with targets that were rejected.
        first_token_seconds: predicted time to the first token of a typical new request, mostly up to 0.25 s
            old. None: it could not be computed.
        report_faults: figures of reports since the start that could not be computed; each is a bug or a full
            disk.
        drafts, draft_tokens: how often a sequence had drafts in a step since the start, and their tokens.
        accepted_tokens: those that became output, by position in the draft.
        page_size: tokens of a page.
        loras: use of adapters; None without enable_lora.
        store: use of a store of pages; None without kv_transfer_config.
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
    first_token_seconds: float | None = 0.0
    report_faults: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: tuple[int, ...] = ()
    host_pages: int = 0
    host_used: int = 0
    host_queries: int = 0
    host_hits: int = 0
    host_declined: int = 0
    host_spilled: int = 0
    host_fetched: int = 0
    host_evictions: int = 0
    resumptions: tuple[int, int, int] = (0, 0, 0)
    page_size: int = 0
    loras: LoraLoad | None = None
    store: StoreLoad | None = None

    def after(self, past: Load) -> Load:
        """This load with the counts of an earlier engine, which has ended, added."""
        pages = dict(zip(past.cache_groups, past.hit_pages, strict=True))
        groups = zip(self.cache_groups, self.hit_pages, strict=True)
        cached, swapped, recomputed = map(sum, zip(past.resumptions, self.resumptions, strict=True))
        return self._replace(
            hit_pages=tuple(count + pages.get(group, 0) for group, count in groups),
            decisions=tuple((Counter(dict(past.decisions)) + Counter(dict(self.decisions))).items()),
            accepted_tokens=tuple(
                map(sum, zip_longest(past.accepted_tokens, self.accepted_tokens, fillvalue=0))
            ),
            resumptions=(cached, swapped, recomputed),
            store=self.store.plus(past.store) if self.store and past.store else self.store,
            **{name: getattr(past, name) + getattr(self, name) for name in COUNTERS},
        )


def combined(loads: List[Load], ended: List[Load] = ()) -> Load:
    """Numbers are sums, but a new request goes to the replica with the soonest first token, and programs are
    those of each.

    Args:
        loads: of the replicas that run, at least one.
        ended: last loads of others, of which only counts since their start matter.
    """
    first, fields = loads[0], dict[str, Any]()
    for name in Load._fields:
        values = [getattr(load, name) for load in loads]
        if name in SAME:
            continue
        if name in LEAST:
            fields[name] = min((value for value in values if value is not None), default=None)
        elif name == "store":
            known = [load for load in values if load is not None]
            fields[name] = reduce(StoreLoad.plus, known) if known else None
        elif name == "decisions":
            fields[name] = tuple(sum((Counter(dict(value)) for value in values), Counter()).items())
        elif isinstance(values[0], tuple):
            fields[name] = tuple(map(sum, zip_longest(*values, fillvalue=0)))
        else:
            fields[name] = sum(values)
    return reduce(Load.after, ended, first._replace(**fields))
