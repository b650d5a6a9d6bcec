"""What all services answer requests with, whatever the protocol."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jengine import (
    MAX_CLIENT,
    AsyncLLM,
    GenerationParams,
    InvalidArgument,
    OutputKind,
    PreparedPrompt,
    RequestHandle,
    TokensPrompt,
    chat_prompt,
)
from jengine.serving.admission import Admission, client_of
from jengine.serving.bounds import RequestBounds
from jengine.serving.call import Call
from jengine.serving.config import ServerConfig
from jengine.serving.metrics import Metrics
from jengine.serving.model_provider import ModelProvider
from jengine.serving.pace import Pace
from jengine.serving.request_log import RequestLog
from jengine.serving.sandbox import Sandbox
from jengine.serving.security import salted, scoped
from jengine.serving.spans import Spans
from jengine.serving.text_work import TextWork
from jengine.serving.tracking import RequestTracker

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]  # messages, and ChatOptions


class Shared(NamedTuple):
    """A server's parts.

    Attributes:
        sandbox: where grammars are checked, and clients' chat templates rendered.
        text_work: where long texts are tokenized.
        write_timeout: seconds in which a client must take each message of a stream.
        client_chat_templates: whether clients may send chat templates of their own.
    """

    models: ModelProvider
    admission: Admission
    tracker: RequestTracker
    bounds: RequestBounds
    sandbox: Sandbox
    text_work: TextWork
    pace: Pace
    write_timeout: float
    client_chat_templates: bool

    @classmethod
    def of(
        cls,
        config: ServerConfig,
        models: ModelProvider,
        metrics: Metrics,
        request_log: RequestLog | None = None,
        spans: Spans | None = None,
    ) -> Shared:
        """In the event loop that the server will run in. Close the sandbox after it has stopped."""
        return cls(
            models,
            Admission(config, models),
            RequestTracker(metrics, request_log, spans),
            RequestBounds.of(config),
            Sandbox(),
            TextWork(),
            Pace(),
            config.write_timeout,
            config.client_chat_templates,
        )


class Asked(NamedTuple):
    """What a request asks for.

    Attributes:
        prompt: called once; in a thread where the request is long.
        bytes: of the request.
        embedding: arguments of AsyncLLM.prepare_embedding; it asks for that then, and for no tokens.
    """

    params: GenerationParams
    prompt: Callable[[], str | list[int] | TokensPrompt]
    bytes: int
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    embedding: dict[str, Any] | None = None


class Service:
    """A service's base. Every method may reject a request with the statuses of jengine.serving.errors."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._models, self._admission, self._tracker, self._bounds = shared.models, shared.admission, shared.tracker, shared.bounds
        self._sandbox, self._text_work, self._pace, self._write_timeout = (
            shared.sandbox,
            shared.text_work,
            shared.pace,
            shared.write_timeout,
        )

    async def _submit(self, llm: AsyncLLM, asked: Asked, kind: OutputKind, call: Call, request_id: str) -> RequestHandle:
        """Check and queue a request. What takes long happens in threads, what may go wrong in processes of the sandbox."""
        client, params = client_of(call), asked.params
        salt = salted(asked.cache_salt)  # here: threads do not know the key
        await self._sandbox.check(client, params.structured_outputs, llm.tokenizer)

        def prepare() -> PreparedPrompt:
            given: Any = asked.prompt()
            if not isinstance(given, dict):
                given = {"prompt" if isinstance(given, str) else "prompt_token_ids": given}
            prompt: Any = {**given, "cache_salt": salt}
            return llm.prepare(prompt, params) if asked.embedding is None else llm.prepare_embedding(prompt, **asked.embedding)

        prepared = await self._text_work.run(client, asked.bytes, prepare)
        timeout = self._bounds.timeout(asked.timeout)
        try:
            return llm.submit(
                prepared,
                request_id=scoped(request_id),
                priority=asked.priority,
                ttft_ms=asked.ttft_ms,
                tpot_ms=asked.tpot_ms,
                client=client[:MAX_CLIENT],
                timeout=timeout,
                output_kind=kind,
            )
        except InvalidArgument as wrong:
            raise wrong if wrong.field != "request_id" else InvalidArgument(wrong.field, request_id, wrong.limit) from None

    async def _render(self, llm: AsyncLLM, read: Callable[[], Conversation], template: str | None, size: int, call: Call) -> TokensPrompt:
        """A conversation's prompt.

        Args:
            read: the conversation; called in a thread where the request, of `size` bytes, is long.
            template: of the client's, which is among the options as well.
        """
        client = client_of(call)
        work = partial(self._text_work.run, client, size)
        if template is None:
            return await work(partial(self._render_here, llm, read))
        if not self._shared.client_chat_templates:
            raise InvalidArgument("chat_template", template, "this server takes no templates from its clients")
        messages, options = await work(read)
        return {"prompt_token_ids": await self._sandbox.render(client, messages, options, llm.tokenizer)}

    def _render_here(self, llm: AsyncLLM, read: Callable[[], Conversation]) -> TokensPrompt:
        messages, options = read()
        return chat_prompt(llm.tokenizer, messages, max_model_len=self._max_model_len, **options)

    @property
    def _max_model_len(self) -> int:
        return self._models.info.limits.sequence.max_model_len

    def _check_ids(self, field: str, count: int) -> None:
        """Before they are copied."""
        if count > self._max_model_len:
            raise InvalidArgument(field, f"{count} ids", f"at most max_model_len = {self._max_model_len}")
