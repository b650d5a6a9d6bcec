"""OpenAI's API inside another program: an ASGI application over an AsyncLLM, without a port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from starlette.types import Message, Receive, Scope, Send

from jengine import AsyncLLM, InvalidArgument
from jengine.serving.calls.model_provider import FixedModel, ModelInfo
from jengine.serving.config import ServerConfig
from jengine.serving.http.app import application
from jengine.serving.http.endpoint import Parts
from jengine.serving.metrics.server_metrics import Metrics
from jengine.serving.requests.service import Shared

UNLIMITED = {"max_streams_per_client": 2**30, "max_calls_per_client": 2**30}
EMBEDDED = {  # options of a server that have an effect without ports, keys and a process for the engine
    "tool_call_parser", "reasoning_parser", "served_model_name", "default_chat_template_kwargs",
    "max_waiting", "max_answer_logprobs", "max_tokens_limit", "max_request_seconds", "max_message_bytes",
    "response_store_bytes", "client_chat_templates", "allowed_media_domains", "allowed_local_media_path",
} | UNLIMITED.keys()  # fmt: skip


def embedded_config(options: Mapping[str, Any], **defaults: Any) -> ServerConfig:
    """A server's options for EmbeddedApi, where all clients may be behind one address.

    Raises:
        InvalidArgument: an option is invalid, or not one of EMBEDDED.
    """
    for name in options.keys() - EMBEDDED:
        limit = f"has no effect inside another program; must be one of {', '.join(sorted(EMBEDDED))}"
        raise InvalidArgument(f"server.{name}", "...", limit)  # it may be a secret
    return ServerConfig(**{**UNLIMITED, **defaults, **options})


class Reply(NamedTuple):
    """A complete response. `headers`: by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class EmbeddedApi:
    """An ASGI application. Belongs to the event loop of its AsyncLLM, which it does not close.

    Args:
        name: the model's name, unless config sets another.
        config: as embedded_config makes it; other options have no effect.
    """

    def __init__(self, llm: AsyncLLM, name: str, config: ServerConfig | None = None) -> None:
        config, metrics = config or ServerConfig(), Metrics()
        name, *aliases = config.served_names or [name]
        info = ModelInfo(name=name, limits=llm.backend.limits, dtype="")
        models = FixedModel(llm, info, aliases=aliases)
        self._shared = Shared.of(config, models, metrics)
        self._app = application(Parts(config, self._shared, None, metrics, lambda: None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def post(self, path: str, body: bytes) -> Reply:
        """Sends a request, and waits for the complete response."""
        start, *parts = [
            part async for part in self.answer("POST", path, {"content-type": "application/json"}, body)
        ]
        status, headers = start
        return Reply(status, {name.lower(): value for name, value in headers.items()}, b"".join(parts))

    async def answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        client: tuple[str, int] = ("127.0.0.1", 0),
    ) -> AsyncGenerator[Any]:
        """Sends a request. Yields status and headers of the response, then pieces of its body as they come.
        Closing the generator aborts the request.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue(1)  # a slow reader delays only its own answer
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return waiting.pop() if waiting else await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(self(http_scope(method, path, headers, client), receive, messages.put))
        try:
            more = True
            while more:
                message = await messages.get()
                if message["type"] == "http.response.start":
                    yield (
                        message["status"],
                        {
                            name.decode("latin-1"): value.decode("latin-1")
                            for name, value in message["headers"]
                        },
                    )
                    continue
                if message["body"]:
                    yield message["body"]
                more = message.get("more_body", False)
        finally:
            task.cancel()

    @property
    def unfinished_tokens(self) -> int:
        """Tokens of all unfinished requests: prompts, and tokens generated so far."""
        return self._shared.tracker.unfinished_tokens

    def close(self) -> None:
        """Ends its worker processes."""
        self._shared.close()


def http_scope(method: str, path: str, headers: dict[str, str], client: tuple[str, int]) -> Scope:
    """ASGI's scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ],
        "client": client,
        "server": None,
    }
