"""OpenAI's API on Ray Serve: replicas with one engine each, scaled by tokens, and a front end that routes by
prefix.

serve run jengine.integrations.ray.serve:app model=demo max_replicas=4

from jengine.integrations.ray.serve import ServeConfig, build_app
serve.run(build_app(ServeConfig(model="Qwen/Qwen3-0.6B", max_replicas=4, num_gpus=1)))
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, fields
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jengine import AsyncLLM, InvalidArgument, SamplingParams
from jengine.serving.config import ServerConfig
from jengine.serving.http.embedded import EmbeddedApi, embedded_config

FIRST = 512  # characters of a prompt, or of a conversation's first question, in the key
SLACK, SHARE = 4, 1.25  # a replica may have up to SHARE times the mean number of requests plus SLACK


def prefix_key(body: Mapping[str, Any]) -> str:
    """A key for requests with a common prefix. Empty if there is no prompt.

    For a conversation: everything before its first question, and the beginning of that question. So later
    turns are routed to the same replica as earlier ones.
    """
    messages, prompt = body.get("messages"), body.get("prompt", body.get("input"))
    if isinstance(messages, list) and messages:
        first = next(
            (
                i
                for i, message in enumerate(messages)
                if isinstance(message, dict) and message.get("role") == "user"
            ),
            len(messages) - 1,
        )
        text = json.dumps([body.get("tools"), messages[:first]]) + json.dumps(messages[first])[:FIRST]
    elif isinstance(prompt, str):
        text = prompt[:FIRST]
    elif isinstance(prompt, list) and prompt:
        text = json.dumps(prompt[0] if isinstance(prompt[0], list | str) else prompt[:FIRST])[:FIRST]
    else:
        return ""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def ranked(key: str, loads: Mapping[str, int]) -> list[str]:
    """Replicas, the best first, by rendezvous hashing, so that few keys move when replicas change. Overloaded
    ones are last. loads: number of requests of each replica.
    """
    limit = SLACK + SHARE * sum(loads.values()) / max(len(loads), 1)

    def place(replica: str) -> tuple[bool, bytes]:
        return loads[replica] > limit, hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()

    return sorted(loads, key=place)


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # ray's types are not checked
    """Ray Serve's interface to `ranked`, by a call's `key`; without it, the least loaded replica."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        key = pending_request.kwargs.get("key") if pending_request is not None else None
        if not key:
            return [candidate_replicas]
        replicas = {replica.replica_id.to_full_id_str(): replica for replica in candidate_replicas}
        loads = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in replicas.items()
        }
        return [[replicas[name]] for name in ranked(key, loads)]


ATTEMPTS = 5  # attempts for a request whose replica ends before it has begun to answer
PARSED = 2**20  # maximum bytes of a body that is parsed for its prefix
# a replica's metric: tokens of unfinished requests, prompts and maximum outputs
QUEUED_TOKENS = "queued_tokens"
GONE = "the replica has ended; try again"

log = logging.getLogger("ray.serve")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of the application.

    Args:
        model: as in LLM.
        engine_kwargs: options of each replica's engine, as in LLM.
        server: options of a server, those that are EMBEDDED. Ray manages ports and TLS; there are no keys.
        min_replicas, max_replicas: numbers of engine replicas.
        target_tokens: tokens (prompts and generated) of unfinished requests per replica. The number of
            replicas grows above it, and shrinks below.
        upscale_delay, downscale_delay: seconds for which this must last.
        max_ongoing_requests: per replica; further requests wait in the front end.
        front_replicas: replicas of the front end, which only forwards requests.
        num_cpus, num_gpus: for each engine replica.
        drain_seconds: time for running requests when a replica is stopped.
    """

    model: str = "demo"
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    min_replicas: int = 1
    max_replicas: int = 1
    target_tokens: float = 16_384
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    max_ongoing_requests: int = 512
    front_replicas: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidArgument(
                "max_replicas",
                self.max_replicas,
                f"must be at least min_replicas = {self.min_replicas}, which must be at least 1",
            )
        if self.target_tokens <= 0:
            raise InvalidArgument("target_tokens", self.target_tokens, "must be above 0")
        stored = self.server_config().response_store_bytes
        if stored and self.max_replicas > 1:
            limit = "must be 0 with max_replicas above 1: replicas do not share responses"
            raise InvalidArgument("server.response_store_bytes", stored, limit)

    def server_config(self) -> ServerConfig:
        alone = {} if self.max_replicas == 1 else {"response_store_bytes": 0}
        return embedded_config(self.server, **alone)


def build_app(
    config: ServeConfig, make_llm: Callable[[ServeConfig], AsyncLLM] | None = None
) -> serve.Application:
    """Builds the application for serve.run. make_llm: creates a replica's engine, instead of the default."""
    engine = serve.deployment(
        name="engine",
        max_ongoing_requests=config.max_ongoing_requests,
        graceful_shutdown_timeout_s=config.drain_seconds,
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        autoscaling_config=AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            upscale_delay_s=config.upscale_delay,
            downscale_delay_s=config.downscale_delay,
            policy=AutoscalingPolicy(
                policy_function="jengine.integrations.ray.serve:QueuedTokens",
                policy_kwargs={"target": config.target_tokens},
            ),
        ),
    )(EngineReplica)
    front = serve.deployment(
        name="front",
        num_replicas=config.front_replicas,
        max_ongoing_requests=2**16,
        ray_actor_options={"num_cpus": 0},
    )(Front)
    return front.bind(engine.bind(config, make_llm), config.server_config().max_message_bytes)


def app(args: dict[str, str]) -> serve.Application:
    """Entry point for `serve run jengine.integrations.ray.serve:app NAME=VALUE...`, with fields of
    ServeConfig; objects are JSON.
    """
    plain: dict[str, Callable[[str], Any]] = {"model": str}
    known = {option.name for option in fields(ServeConfig)}
    for name in args.keys() - known:
        raise InvalidArgument(name, args[name], f"there is no such option, only {', '.join(sorted(known))}")
    options: dict[str, Any] = {name: plain.get(name, json.loads)(value) for name, value in args.items()}
    return build_app(ServeConfig(**options))


class EngineReplica:
    """A replica: an engine, and the ASGI application on top of it."""

    def __init__(
        self, config: ServeConfig, make_llm: Callable[[ServeConfig], AsyncLLM] | None = None
    ) -> None:
        self._config, options = config, config.engine_kwargs
        self._llm = make_llm(config) if make_llm else AsyncLLM(config.model, progress=False, **options)
        self._api: EmbeddedApi | None = None

    async def answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        client: tuple[str, int],
        key: str = "",
    ) -> AsyncGenerator[Any]:
        """Yields status and headers, then pieces of the body. The router uses `key`."""
        if self._api is None:  # created here, where the event loop is running
            self._api = EmbeddedApi(self._llm, self._config.model, self._config.server_config())
        async with aclosing(self._api.answer(method, path, headers, body, client)) as parts:
            async for part in parts:
                yield part

    async def check_health(self) -> None:
        """Raises EngineDead if the engine has failed. Serve then replaces this replica."""
        with suppress(InvalidArgument):  # of a model that only embeds
            async with self._llm.submit({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1)):
                pass  # leaving the block aborts the request

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {QUEUED_TOKENS: 0.0 if self._api is None else float(self._api.unfinished_tokens)}


class QueuedTokens:
    """An autoscaling policy of Ray Serve. Bounds and delays are those of the deployment's autoscaling_config.

    Args:
        target: tokens per replica.
    """

    def __init__(self, target: float = 16_384) -> None:
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and the policy's state, which is empty."""
        tokens = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        wanted = math.ceil(sum(tokens.values()) / self._target)
        bounds = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(bounds[0], min(wanted, bounds[1])), {}


class Front:
    """Forwards requests to the replica chosen by the router. If a replica ends before it has begun to answer,
    another is tried."""

    def __init__(self, engines: DeploymentHandle, most_bytes: int) -> None:
        self._engines, self._most = engines.options(method_name="answer", stream=True), most_bytes

    async def __call__(self, request: Request) -> Response:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._most:
                message = f"the body is too large: at most {self._most} bytes (max_message_bytes)"
                return _error(413, "invalid_request_error", message)
        body, client = b"".join(parts), request.client
        headers = {
            name: value for name, value in request.headers.items() if name in ("content-type", "accept")
        }
        origin = ("unknown", 0) if client is None else (client.host, client.port)
        for attempt in range(ATTEMPTS):
            stream = self._engines.remote(
                request.method, request.url.path, headers, body, origin, key=_key(body)
            )
            try:
                status, head = await anext(aiter(stream))
            except (RayActorError, TaskCancelledError) as gone:
                log.warning(
                    "a replica has ended, attempt %d of %d: %s", attempt + 1, ATTEMPTS, type(gone).__name__
                )
                await asyncio.sleep(0.1 * attempt)
                continue
            # 503: its engine has failed, and the replica will be replaced
            if status != 503 or attempt == ATTEMPTS - 1:
                return StreamingResponse(_rest(stream, head), status, head)
            await asyncio.sleep(0.1 * attempt)
        return _error(503, "service_unavailable_error", GONE)


async def _rest(stream: Any, head: dict[str, str]) -> AsyncIterator[bytes]:
    try:
        async for part in stream:
            yield part
    except RayActorError:
        if not head.get("content-type", "").startswith("text/event-stream"):
            raise
        yield b"data: " + _error(503, "service_unavailable_error", GONE).body + b"\n\ndata: [DONE]\n\n"


def _key(body: bytes) -> str:
    if len(body) > PARSED:
        return ""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the application will report the error
    return prefix_key(fields) if isinstance(fields, dict) else ""


def _error(status: int, kind: str, message: str) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": None}
    return Response(json.dumps({"error": error}), status, media_type="application/json")
