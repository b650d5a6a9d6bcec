"""Answers to conversations: a validated request, the reader of its completions, the interface of each API,
and the service that answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from jengine import (
    AsyncLLM,
    CompletionOutput,
    InvalidArgument,
    PromptTooLong,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
    TokensPrompt,
)
from jengine.serving.calls.errors import Busy
from jengine.serving.calls.named_model import NamedModel
from jengine.serving.calls.portions import Parts, Portions, encoded
from jengine.serving.guards.admission import client_of
from jengine.serving.http import replies
from jengine.serving.http.bodies import Body
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.endpoint import Handler
from jengine.serving.http.parameters import (
    ToolChoice,
    chat_params,
    effort_variables,
    read_tools,
    shows_tools,
    with_thinking_budget,
)
from jengine.serving.http.replies import TokenTexts, chat_logprobs
from jengine.serving.http.service import TEMPLATE_OPTIONS, HttpService, check_conversation, level_of
from jengine.serving.parsers.events import Arguments, Event, OutputParser, Reasoning, ToolCallStart, joined
from jengine.serving.parsers.formats import AnswerFormat
from jengine.serving.requests.answers import Aborts, Answer
from jengine.serving.requests.service import ParsedRequest, Shared
from jengine.serving.requests.tracking import TrackedRequest, new_id
from jengine.spi import OutputKind, after_thought


class Chat(NamedTuple):
    """A validated request.

    Attributes:
        request: the fields in the form of its API.
        request_id: its id for clients; empty if its tokens are only counted.
        portions: in which its answer is made.
        count_tokens: counts a text's tokens; 0 if that is not possible now.
        prompt: the prompt's text, once it has been rendered.
        thinks: whether the model may reason before it answers; False if a grammar applies from the first
            token on.
    """

    body: Body
    params: SamplingParams
    tools: ToolChoice
    form: AnswerFormat
    llm: AsyncLLM
    created: int
    model: NamedModel
    request: Mapping[str, Any]
    request_id: str
    portions: Portions
    count_tokens: Callable[[str], Awaitable[int]]

    prompt: str = ""
    thinks: bool = True

    def rendered(self, prompt: TokensPrompt) -> Chat:
        """Sets the prompt, which shows whether the model reasons first. Constraints on the answer apply after
        the reasoning."""
        text = prompt["prompt"]
        structure, inside = self.params.structured_outputs, self.form.reasoning(text, self.continues)
        tools, channels = self.tools, self.form.channels and not self.continues
        if not isinstance(structure, StructuredOutputs):
            if not (tools.plain and tools.callable) or self.continues:
                return self._replace(prompt=text)
            after = tools.or_any_text(inside)
        elif channels and (calls := tools.in_channels()) is not None:
            after = calls
        elif tools.forced is None and not self.continues and (tools.callable or channels):
            after = tools.or_text(structure, self.form, inside)
        elif inside is not None:
            after = tools.structure(inside) or after_thought(structure, inside)
        else:
            return self._replace(prompt=text, thinks=False)
        return self._replace(prompt=text, params=self.params.clone(structured_outputs=after))

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.body.get("continue_final_message"))

    def parser(self) -> OutputParser:
        """A parser for one completion."""
        tools, forced = self.tools, self.tools.forced_parser()
        return self.form.parser(
            self.prompt, tools.callable, self.thinks, forced, self.continues, tools.plain, tools.grammars
        )

    def read(self, text: str) -> list[Event]:
        """Parses a whole completion. Returns the events that the client wants."""
        parser = self.parser()
        return self.shown(joined([*parser.push(text), *parser.finish()]))

    def shown(self, events: list[Event]) -> list[Event]:
        """The events that the client wants."""
        reasoning = self.body.get("include_reasoning", True)
        calls = self.body.get("max_tool_calls") if self.tools.parallel else 1
        return [
            event
            for event in events
            if (reasoning or not isinstance(event, Reasoning))
            and (calls is None or not isinstance(event, ToolCallStart | Arguments) or event.index < calls)
        ]

    async def logprobs(self, completion: CompletionOutput) -> dict[str, Parts]:
        """Log probabilities for a choice's fields."""
        if not completion.logprobs:
            return {}
        texts = TokenTexts(self.llm.tokenizer, self.body.get("return_tokens_as_token_ids", False))
        top = self.body.get("top_logprobs", 0)
        return {"logprobs": await chat_logprobs(self.portions, completion.logprobs, top, texts)}

    def ids(self, completion: CompletionOutput) -> dict[str, Parts]:
        """Token ids for a choice's fields, and which weights made them."""
        if not self.body.get("return_token_ids"):
            return {}
        return {
            "token_ids": encoded(completion.token_ids),
            "weights_versions": encoded(completion.weights_versions),
        }

    async def prompt_facts(self, output: RequestOutput) -> dict[str, Parts]:
        """Facts about the prompt for a response's fields."""
        facts: dict[str, Parts] = {}
        if self.body.get("return_token_ids"):
            facts["prompt_token_ids"] = encoded(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            facts["prompt_logprobs"] = await replies.prompt_logprobs(self.portions, output.prompt_logprobs)
        return facts


def reason(completion: CompletionOutput, called: bool) -> str | None:
    return "tool_calls" if called and completion.finish_reason == "stop" else completion.finish_reason


def call_id() -> str:
    return f"call_{new_id()}"


class ChatInput(NamedTuple):
    """A body that has been read.

    Attributes:
        body: the same request in the fields of /v1/chat/completions.
        names: see HttpCall.
        request: the fields in the form of the API.
    """

    body: Body
    names: dict[str, str]
    request: Mapping[str, Any]


class AnswerStream(Protocol):
    """Sends an answer as events.

    Attributes:
        finished: whether the last output has been shown.
    """

    finished: bool

    async def start(self) -> None:
        """The request is queued."""

    async def show(self, output: RequestOutput) -> None:
        """Sends new output (of kind delta)."""

    async def end(self) -> None:
        """Ends the events."""


class ChatApi:
    """Base class of APIs.

    Attributes:
        path: of its requests, for logs.
        aborts: those that its answers show.
    """

    path: str
    aborts: Aborts

    def read(self, json_body: dict[str, Any]) -> ChatInput:
        """Validates a body. Raises InvalidArgument, naming the field."""
        raise NotImplementedError

    def headers(self, chat: Chat) -> dict[str, str]:
        """Headers of an answer."""
        return id_headers(chat.request_id)

    async def whole(self, chat: Chat, output: RequestOutput) -> Parts:
        """A complete answer (of kind final)."""
        raise NotImplementedError

    def stream(self, call: HttpCall, chat: Chat, output: RequestOutput) -> AnswerStream:
        """A streamed answer. `output` is that of a request that has just been queued."""
        raise NotImplementedError

    async def begin_too_long(self, call: HttpCall, chat: Chat) -> None:
        """The prompt of a streamed answer is too long: begins the stream if clients look for the error there,
        rather than for an HTTP status.
        """


Read = Callable[[dict[str, Any]], ChatInput]
Expand = Callable[[HttpCall, dict[str, Any]], Awaitable[dict[str, Any]]]


class ChatService(HttpService):
    """Answers conversations.

    Args:
        expand: completes a request before it is read; takes and returns its body.
    """

    def __init__(self, shared: Shared, api: ChatApi, expand: Expand | None = None) -> None:
        super().__init__(shared)
        self.PATH, self._api, self._expand = api.path, api, expand

    async def _json(self, call: HttpCall) -> dict[str, Any]:
        json_body = await super()._json(call)
        return json_body if self._expand is None else await self._expand(call, json_body)

    async def _create(self, call: HttpCall, json_body: dict[str, Any]) -> None:
        with self._tracked(call, json_body) as tracked:
            chat = await self._chat(call, self._api.read, json_body, tracked)
            with self._admission.place(chat.params.n, call) as tracked.place:
                respond = self._stream if chat.body.get("stream") else self._whole
                await respond(call, chat, tracked)

    def counter(self, read: Read, reply: Callable[[int], dict[str, Any]]) -> Handler:
        """A handler that counts a prompt's tokens. `reply`: the answer with their number."""

        async def count(call: HttpCall, json_body: dict[str, Any]) -> None:
            self._admission.stream(call)
            prompt = await self._prompt(call, await self._chat(call, read, json_body))
            await call.answer(200, msgspec.json.encode(reply(len(prompt["prompt_token_ids"]))))

        return self.handler(count)

    async def _chat(
        self, call: HttpCall, read: Read, json_body: dict[str, Any], tracked: TrackedRequest | None = None
    ) -> Chat:
        chat_input = await self._work(call, lambda: read(json_body))
        call.names = chat_input.names
        body, model = await self._accepted(chat_input.body, call, tracked)
        check_conversation(body)
        llm, tokenizer = model.llm, model.tokenizer
        form = await self._answer_format(tokenizer)
        tools = read_tools(body, form, shows_tools(tokenizer, body.get("chat_template")))
        default = self._bounds.default(llm.get_default_sampling_params())
        params = self._bounds.params(tools.constrain(chat_params(body, default)))
        params = with_thinking_budget(params, body, form, tokenizer)
        if form.shows_special_tokens and (form.channels or (tools.callable and tools.forced is None)):
            params = params.clone(skip_special_tokens=False)

        async def count(text: str) -> int:
            encode = partial(tokenizer.encode, text, False)
            with contextlib.suppress(Busy, InvalidArgument):  # which must not take a finished answer
                return len(await self._text_work.run(client_of(call), len(text), encode)) if text else 0
            return 0

        request_id, created = "" if tracked is None else tracked.request_id, int(time.time())
        request, portions = chat_input.request, self._shared.portions
        return Chat(body, params, tools, form, llm, created, model, request, request_id, portions, count)

    async def _prompt(self, call: HttpCall, chat: Chat) -> TokensPrompt:
        body = chat.body
        options = {name: body.get(name) for name in TEMPLATE_OPTIONS if body.get(name) is not None}
        if (effort := body.get("reasoning_effort")) is not None:
            variables = options.get("chat_template_kwargs", {})
            options["chat_template_kwargs"] = {**effort_variables(effort), **variables}
        if chat.tools.shown:
            options |= {"tools": chat.tools.shown, "tool_choice": chat.tools.forced}
            options |= {"tools_as_text": chat.tools.plain}
        messages, template = body.get("messages"), body.get("chat_template")
        return await self._render(chat.model, lambda: (messages, options), template, call.size, call)

    async def _queue(
        self, call: HttpCall, chat: Chat, kind: OutputKind, tracked: TrackedRequest
    ) -> tuple[Answer, Chat]:
        """Renders the prompt and queues the request."""
        prompt = await self._prompt(call, chat)
        chat = chat.rendered(prompt)
        parsed = ParsedRequest(chat.params, lambda: prompt, call.size, **level_of(chat.body))
        return await self._submit(chat.model, parsed, kind, call, tracked, self._api.aborts), chat

    async def _whole(self, call: HttpCall, chat: Chat, tracked: TrackedRequest) -> None:
        queued, chat = await self._queue(call, chat, "final", tracked)
        with queued as answer:
            output = await answer.next()
        await call.answer(200, await self._api.whole(chat, output), self._api.headers(chat))

    async def _stream(self, call: HttpCall, chat: Chat, tracked: TrackedRequest) -> None:
        try:
            queued, chat = await self._queue(call, chat, "delta", tracked)
        except PromptTooLong:
            await self._api.begin_too_long(call, chat)
            raise
        with queued as answer:
            stream = self._api.stream(call, chat, answer.output)
            await call.start_events(self._api.headers(chat))
            await stream.start()
            while not stream.finished:
                await stream.show(await answer.next())
        await stream.end()
