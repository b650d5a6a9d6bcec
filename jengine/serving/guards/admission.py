"""Admission control: bounds the parameters of a request, waiting work, and the concurrent calls of one client
over all methods and protocols. Belongs to one event loop; never blocks.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple
from urllib.parse import unquote

import grpc

from jengine import InvalidArgument, SamplingParams
from jengine.serving.calls.call import Call, ContextInterceptor
from jengine.serving.calls.errors import Busy, Refusal, status_metadata
from jengine.serving.calls.model_provider import ServedModels
from jengine.serving.config import ServerConfig
from jengine.serving.guards.security import current_key
from jengine.serving.metrics.server_metrics import Metrics
from jengine.spi import GenerationParams

HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class RequestBounds(NamedTuple):
    """The server's limits on parameters."""

    config: ServerConfig

    def default(self, params: SamplingParams) -> SamplingParams:
        """The model's parameters for requests that do not set them, within these limits."""
        limit, max_tokens = self.config.max_tokens_limit, params.max_tokens
        if limit is None or max_tokens is None or max_tokens <= limit:
            return params
        return params.clone(max_tokens=limit)

    def params[P: GenerationParams](self, params: P) -> P:
        """The parameters, with the server's max_tokens if they set none: log probabilities of that many fill
        at most half an answer.

        Raises:
            InvalidArgument: they exceed the server's limit.
        """
        limit = self.config.max_tokens_limit
        if params.max_tokens is None:
            limits = [] if limit is None else [limit]
            if isinstance(params, SamplingParams) and params.logprobs is not None:
                tokens = self.config.max_answer_logprobs // 2 // (params.n * (params.logprobs + 1))
                limits.append(max(tokens, params.min_tokens, 1))
            return dataclasses.replace(params, max_tokens=min(limits)) if limits else params
        if limit is not None and params.max_tokens > limit:
            why = f"at most {limit} on this server (max_tokens_limit)"
            raise InvalidArgument("max_tokens", params.max_tokens, why)
        return params

    def timeout(self, seconds: float | None) -> float | None:
        """The request's timeout, or the server's.

        Raises:
            InvalidArgument: it is longer than the server's.
        """
        limit = self.config.max_request_seconds
        if limit is not None and seconds is not None and seconds > limit:
            why = f"at most {limit:g} seconds on this server (max_request_seconds)"
            raise InvalidArgument("timeout", seconds, why)
        return limit if seconds is None else seconds


def allowed_priority(priority: int | None) -> int:
    """A request's priority; None, if it sets none: 0, or the key's lowest if that is above 0.

    Raises:
        Refusal: the key does not allow it. Without keys, all priorities are allowed.
    """
    key = current_key.get()
    if priority is None:
        return max(0, 0 if key is None else key.min_priority)
    if key is not None and type(priority) is int and priority < key.min_priority:
        message = (
            f"priority={priority}: at least {key.min_priority} with this key (its min_priority; lower runs"
            " first)"
        )
        raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="priority")
    return priority


def sees_all_clients() -> bool:
    """Whether the caller may see other clients' activity: its key allows it, or there are no keys."""
    key = current_key.get()
    return key is None or key.admin == 1


def check_admin(peer: str) -> None:
    """Raises Refusal unless the caller is an administrator: its key has admin=1 or, without keys, it is on
    this machine.

    Args:
        peer: address of the caller in gRPC's form: "ipv4:127.0.0.1:12345", "ipv6:%5B::1%5D:12345".
    """
    if current_key.get() is None and not is_loopback(peer):
        message = "without API keys, only clients on the server's machine may do this"
    elif not sees_all_clients():
        message = "this needs an API key whose line in the keys file has admin=1"
    else:
        return
    raise Refusal(grpc.StatusCode.PERMISSION_DENIED, message, cause="admin")


def is_loopback(peer: str) -> bool:
    """Whether a peer, in gRPC's form, is on this machine. False if it is not an address."""
    kind, _, rest = unquote(peer).partition(":")
    try:
        address = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return kind in ("ipv4", "ipv6") and (mapped or address).is_loopback


ROUNDING = 1e-6  # tokens; a request that arrives exactly at its retry time must pass
SHORTEST_RETRY, LONGEST_RETRY = 0.1, 30.0  # seconds
# tokens charged for a second of a key's work outside the engine's steps: the compilation of a grammar
WORK_TOKENS = 1000


class TokenBucket:
    """A token bucket with a capacity of `per_minute` tokens, which is refilled at that rate.

    The tokens of a request are known only while it runs. So it reserves what it may use when it starts, and
    is charged as it proceeds. A request may start while the level, less what running requests have reserved,
    is positive. The level may become negative, and then must become positive before another request may
    start.

    Times are in seconds of any clock that does not go back.

    Attributes:
        reserved: tokens that running requests may still use.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._as_of, self.reserved = float(per_minute), now, 0.0

    def seconds_until_ready(self, now: float) -> float:
        """Seconds until a request may start, if running ones use what they have reserved; 0: now."""
        self._flow(now)
        missing = 1.0 - (self._level - self.reserved)
        return 0.0 if missing <= ROUNDING else missing * 60.0 / self.per_minute

    def charge(self, tokens: float, now: float) -> None:
        self._flow(now)
        self._level -= tokens

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the limit; debts are kept."""
        self._flow(now)
        self.per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _flow(self, now: float) -> None:
        self._level = min(self._level + (now - self._as_of) * self.per_minute / 60.0, float(self.per_minute))
        self._as_of = now


class ServerAdmission:
    """Counts running and waiting completions in total and per client, and each client's calls, streams, log
    probabilities and tokens a minute.

    Attributes:
        most_calls: maximum concurrent calls of a client. A key that may have more streams may have as many
            calls.
        taken: number of running and waiting completions.
    """

    def __init__(self, config: ServerConfig, models: ServedModels, metrics: Metrics) -> None:
        self._models, self._metrics = models, metrics
        self.most_calls = max(config.max_calls_per_client, config.max_streams_per_client)
        self._waiting = config.max_waiting
        self._per_client = config.max_streams_per_client
        self._most_logprobs = config.max_answer_logprobs
        self.taken = 0
        self._calls: Counter[str] = Counter()  # by client
        self._streams: Counter[str] = Counter()
        self._completions: Counter[str] = Counter()
        self._scored: Counter[str] = Counter()  # log probabilities of the prompts in a client's answers
        self._buckets: dict[str, TokenBucket] = {}  # of keys with a token limit
        self._seconds = SHORTEST_RETRY  # recent duration of a completion

    @contextmanager
    def call(self, call: Call) -> Iterator[None]:
        """A context in which the call is counted.

        Raises:
            Busy: the client has too many calls.
        """
        client, limit = client_of(call), max(self.most_calls, self._client_limit())
        if self._calls.get(client, 0) >= limit:
            self._metrics.rejected("client_calls")
            raise Busy(f"this client has {limit} calls, the maximum")
        self._calls[client] += 1
        try:
            yield
        finally:
            take(self._calls, client, 1)

    def stream(self, call: Call) -> None:
        """Counts one more stream of this client until its last message has been sent.

        Raises:
            Busy: the client has too many streams.
        """
        client, limit = client_of(call), self._client_limit()
        if self._streams.get(client, 0) >= limit:
            has = f"this client has {limit} streams, the maximum"
            raise Busy(has, self._retry_seconds(), "client_streams")
        self._streams[client] += 1
        call.add_done_callback(lambda _: take(self._streams, client, 1))

    def portion(self, prompts: int) -> int:
        """How many of a request's prompts are answered at once, if the others may wait for them."""
        limit = min(self._client_limit(), self._models.max_num_seqs + self._waiting)
        return prompts if prompts <= limit else max(limit // 2, 1)

    def place(self, n: int, call: Call) -> Place:
        """Reserves places for the completions of a request's only prompt. Raises as `places`."""
        return self.places(1, n, call)[0]

    def places(self, prompts: int, n: int, call: Call, field: str = "prompt") -> list[Place]:
        """Reserves places for n completions of each of a request's prompts: for all of them, or for none.

        Args:
            field: the field of the request that holds the prompts.

        Raises:
            Busy: too many completions wait, the client has too many, or its tokens of this minute are used
                up.
            InvalidArgument: so many completions are never possible; names the field that requests them.
        """
        count, requesting = prompts * n, "n" if prompts == 1 else field
        running, client, limit = self._models.max_num_seqs, client_of(call), self._client_limit()
        places = running + self._waiting
        if count > limit:
            why = (
                f"at most {limit}, the maximum of concurrent completions per client (max_streams_per_client)"
            )
            raise InvalidArgument(requesting, count, why)
        if count > places:
            why = f"at most {places}: {running} running and {self._waiting} waiting"
            raise InvalidArgument(requesting, count, why)
        bucket = self._bucket(client)
        _check_tokens(bucket)
        if self._completions.get(client, 0) + count > limit:
            has = f"this client has {self._completions[client]} completions; the maximum is {limit}"
            raise Busy(has, self._retry_seconds(), "client_streams")
        if self.taken + count > places:
            full = f"{self._waiting} requests are waiting; the queue is full"
            raise Busy(full, self._retry_seconds(), "queue_full")
        self.taken += count
        self._completions[client] += count
        request = _Request()
        return [Place(self, client, n, bucket, request) for _ in range(prompts)]

    def hold(self, client: str, prompt: int, output: int, request: _Request) -> None:
        """Counts log probabilities of an answer. Raises as Place.hold."""
        limit = self._most_logprobs
        held = request.logprobs + prompt + output
        if held > limit:
            field = "prompt_logprobs" if prompt > output else "logprobs"
            raise InvalidArgument(
                field, f"{held} values in the answer", f"at most {limit} on this server (max_answer_logprobs)"
            )
        if self._scored.get(client, 0) + prompt > limit:
            has = (
                f"the answers to this client hold {self._scored[client]} log probabilities of prompts; the"
                f" maximum is {limit}"
            )
            raise Busy(has, self._retry_seconds(), "client_logprobs")
        request.logprobs = held
        self._scored[client] += prompt

    def leave(self, client: str, n: int, scored: int, seconds: float) -> None:
        """Records that a client's completions have ended after this many seconds."""
        self.taken -= n
        take(self._completions, client, n)
        take(self._scored, client, scored)
        self._seconds += 0.1 * (seconds - self._seconds)

    def charge_work(self, client: str, seconds: float) -> None:
        """Charges the calling client processor time spent outside the engine's steps, as WORK_TOKENS tokens a
        second.
        """
        if (bucket := self._bucket(client)) is not None:
            bucket.charge(seconds * WORK_TOKENS, time.monotonic())

    def _client_limit(self) -> int:
        """Maximum number of streams, and of completions, for the calling client."""
        key = current_key.get()
        return self._per_client if key is None or key.max_streams is None else key.max_streams

    def _bucket(self, client: str) -> TokenBucket | None:
        key, now = current_key.get(), time.monotonic()
        if key is None or key.tokens_per_minute is None:
            self._buckets.pop(client, None)
            return None
        bucket = self._buckets.setdefault(client, TokenBucket(key.tokens_per_minute, now))
        if bucket.per_minute != key.tokens_per_minute:  # the keys have been reloaded
            bucket.resize(key.tokens_per_minute, now)
        return bucket

    def _retry_seconds(self) -> float:
        """Seconds until about half of the queue has started, so that not all rejected clients find it full
        again.
        """
        running = self._models.max_num_seqs
        rounds = max(self.taken - running, 0) / running
        return min(max(self._seconds * rounds / 2, SHORTEST_RETRY), LONGEST_RETRY)


class _Request:
    """A request, which has a Place for each of its prompts."""

    logprobs = 0  # of its answer


class Place:
    """The places of a prompt, returned by `ServerAdmission.places`. `release` may be called repeatedly."""

    def __init__(
        self, admission: ServerAdmission, client: str, n: int, bucket: TokenBucket | None, request: _Request
    ) -> None:
        self._admission, self._client, self._n, self._since = admission, client, n, time.monotonic()
        self._bucket, self._charged, self._reserved, self._request, self._scored = bucket, 0, 0, request, 0

    @property
    def limited(self) -> bool:
        """Whether tokens are charged."""
        return self._bucket is not None

    def reserve(self, prompt: int, output: int, first: bool) -> None:
        """Reserves the tokens that the prompt and its completions may use, before the engine works on them.

        Args:
            output: maximum tokens of each completion.
            first: whether this is the request's first prompt. The budget is not checked again for the others.

        Raises:
            Busy: the client's running requests may use all its tokens.
        """
        if self._bucket is None:
            return
        if first:
            _check_tokens(self._bucket)
        tokens = prompt + self._n * output
        self._reserved += tokens
        self._bucket.reserved += tokens

    def charge(self, tokens: int) -> None:
        """Reports the request's total tokens so far, including the prompt."""
        if self._bucket is not None and tokens > self._charged:
            self._bucket.charge(tokens - self._charged, time.monotonic())
            self._unreserve(tokens - self._charged)
            self._charged = tokens

    def _unreserve(self, tokens: int) -> None:
        tokens = min(tokens, self._reserved)
        self._reserved -= tokens
        if self._bucket is not None:
            self._bucket.reserved -= tokens

    def hold(self, prompt: int, output: int) -> None:
        """Reserves room in the request's answer for log probabilities of its prompt and of its output, until
        the release.

        Raises:
            InvalidArgument: more than an answer may hold.
            Busy: the client's other answers hold too many of prompts.
        """
        self._admission.hold(self._client, prompt, output, self._request)
        self._scored += prompt

    def release(self) -> None:
        if self._n:
            n, self._n = self._n, 0
            self._unreserve(self._reserved)
            self._admission.leave(self._client, n, self._scored, time.monotonic() - self._since)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _check_tokens(bucket: TokenBucket | None) -> None:
    """Raises Busy if a client's tokens of this minute are used up, or reserved by its running requests."""
    if bucket is not None and (seconds := bucket.seconds_until_ready(time.monotonic())):
        why = "its running requests may use the rest" if bucket.reserved else "has used them"
        limited = (
            f"this client may use {bucket.per_minute} tokens a minute, and {why}; try again in"
            f" {seconds:.1f} s"
        )
        raise Busy(limited, seconds, "tokens_per_minute")


def take(counts: Counter[str], client: str, n: int) -> None:
    """Subtracts from a counter, removing clients whose count becomes zero."""
    counts[client] -= n
    if not counts[client]:  # also if it was missing
        del counts[client]


def client_of(call: Call) -> str:
    """The name of the client's key or, without keys, its address without the port."""
    key = current_key.get()
    return f"key {key.name}" if key is not None else str(call.peer()).rpartition(":")[0]


class CallInterceptor(ContextInterceptor):
    """Counts gRPC calls except health checks, and rejects those of clients with too many with
    RESOURCE_EXHAUSTED.
    """

    def __init__(self, admission: ServerAdmission) -> None:
        self._admission = admission

    @asynccontextmanager
    async def around(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        with ExitStack() as stack:
            try:
                if method != HEALTH_CHECK:
                    stack.enter_context(self._admission.call(context))
            except Busy as refused:
                await context.abort(refused.code, refused.message, status_metadata(refused))
                raise
            yield
