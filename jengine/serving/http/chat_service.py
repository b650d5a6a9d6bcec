"""Answers to conversations, in each API that has them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from jengine import PromptTooLong, RequestHandle, TokensPrompt
from jengine.serving.guards.admission import Place, client_of
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_request import Chat, ChatApi, ChatInput
from jengine.serving.http.endpoint import Handler, while_connected
from jengine.serving.http.parameters import chat_params
from jengine.serving.http.service import TEMPLATE_OPTIONS, HttpService, check_conversation, level_of
from jengine.serving.http.thinking import effort_variables, with_thinking_budget
from jengine.serving.http.tool_choice import read_tools, shows_tools
from jengine.serving.requests.answers import Answer
from jengine.serving.requests.service import ParsedRequest, Shared
from jengine.serving.requests.tracking import TrackedRequest
from jengine.spi import OutputKind

Read = Callable[[dict[str, Any]], ChatInput]
Expand = Callable[[HttpCall, dict[str, Any], int], Awaitable[tuple[dict[str, Any], int]]]


class ChatService(HttpService):
    """Answers conversations.

    Args:
        expand: completes a request before it is read; takes and returns its body and its size in bytes.
    """

    def __init__(
        self,
        shared: Shared,
        most_bytes: int,
        parsers: tuple[str, str],
        api: ChatApi,
        expand: Expand | None = None,
    ) -> None:
        super().__init__(shared, most_bytes, parsers)
        self.PATH, self._api, self._expand = api.path, api, expand

    async def _json(self, call: HttpCall) -> tuple[dict[str, Any], int]:
        json_body, size = await super()._json(call)
        return (json_body, size) if self._expand is None else await self._expand(call, json_body, size)

    async def _create(self, call: HttpCall, json_body: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as tracked:
            self._admission.stream(call)
            chat = await self._chat(
                call, await self._read_input(call, self._api.read, json_body, size), tracked
            )
            with self._admission.place(chat.params.n, call) as place:
                tracked.place = place
                if chat.body.get("stream"):
                    await self._stream(call, chat, size, tracked, place)
                else:
                    await self._whole(call, chat, size, tracked, place)

    def counter(self, read: Read, reply: Callable[[int], dict[str, Any]]) -> Handler:
        """A handler that counts a prompt's tokens. `reply`: the answer with their number."""

        async def count(call: HttpCall, json_body: dict[str, Any], size: int) -> None:
            self._admission.stream(call)
            chat = await self._chat(call, await self._read_input(call, read, json_body, size))
            prompt = await self._prompt(call, chat, size)
            await call.answer(200, msgspec.json.encode(reply(len(prompt["prompt_token_ids"]))))

        async def handle(call: HttpCall) -> None:
            await while_connected(call, count(call, *await self._json(call)))

        return handle

    async def _read_input(
        self, call: HttpCall, read: Read, json_body: dict[str, Any], size: int
    ) -> ChatInput:
        """Validates a body, in a thread if it is long."""
        return await self._text_work.run(client_of(call), size, lambda: read(json_body))

    async def _chat(
        self, call: HttpCall, chat_input: ChatInput, tracked: TrackedRequest | None = None
    ) -> Chat:
        call.names = chat_input.names
        body, model = await self._accepted(chat_input.body, call, tracked)
        check_conversation(body)
        llm, tokenizer = model.llm, model.tokenizer
        form = await self._answer_format(tokenizer)
        tools = read_tools(body, form, shows_tools(tokenizer, body.get("chat_template")))
        params = self._bounds.params(tools.constrain(chat_params(body, llm.get_default_sampling_params())))
        params = with_thinking_budget(params, body, form, tokenizer)
        if form.shows_special_tokens and (form.channels or (tools.callable and tools.forced is None)):
            params = params.clone(skip_special_tokens=False)
        work, encode = partial(self._text_work.run, client_of(call)), tokenizer.encode

        async def count(text: str) -> int:
            return len(await work(len(text), lambda: encode(text, False))) if text else 0

        return Chat(body, params, tools, form, llm, int(time.time()), model, chat_input.request, count)

    async def _prompt(self, call: HttpCall, chat: Chat, size: int) -> TokensPrompt:
        body = chat.body
        options = {name: body.get(name) for name in TEMPLATE_OPTIONS if body.get(name) is not None}
        if (effort := body.get("reasoning_effort")) is not None:
            variables = options.get("chat_template_kwargs", {})
            options["chat_template_kwargs"] = {**effort_variables(effort), **variables}
        if chat.tools.shown:
            options |= {"tools": chat.tools.shown, "tool_choice": chat.tools.forced}
            options |= {"tools_as_text": chat.tools.plain}
        messages, template = body.get("messages"), body.get("chat_template")
        return await self._render(chat.model, lambda: (messages, options), template, size, call)

    async def _queue(
        self, call: HttpCall, chat: Chat, size: int, kind: OutputKind, request_id: str, place: Place
    ) -> tuple[RequestHandle, Chat]:
        """Renders the prompt and queues the request."""
        prompt = await self._prompt(call, chat, size)
        chat = chat.rendered(prompt)
        parsed = ParsedRequest(chat.params, lambda: prompt, size, **level_of(chat.body))
        return await self._submit(chat.model, parsed, kind, call, request_id, place), chat

    async def _whole(
        self, call: HttpCall, chat: Chat, size: int, tracked: TrackedRequest, place: Place
    ) -> None:
        handle, chat = await self._queue(call, chat, size, "final", tracked.request_id, place)
        with Answer(handle, tracked, aborts=self._api.aborts) as answer:
            output = await answer.next()
        text = await self._api.whole(chat, output, tracked.request_id, self._shared.portions.answer())
        await call.answer(200, text, self._api.headers(tracked.request_id))

    async def _stream(
        self, call: HttpCall, chat: Chat, size: int, tracked: TrackedRequest, place: Place
    ) -> None:
        portioned = self._shared.portions.answer()
        try:
            handle, chat = await self._queue(call, chat, size, "delta", tracked.request_id, place)
        except PromptTooLong:
            await self._api.begin_too_long(call, chat, tracked.request_id, portioned)
            raise
        with Answer(handle, tracked, self._pace, self._api.aborts) as answer:
            stream = self._api.stream(call, chat, handle.output, tracked.request_id, portioned)
            await call.start_events(self._api.headers(tracked.request_id))
            await stream.start()
            while not stream.finished:
                await stream.show(await answer.next())
        await stream.end()
