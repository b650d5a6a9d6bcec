"""/v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from jengine import CompletionOutput, OutputKind, RequestHandle
from jengine.serving.calls.portions import Portioned
from jengine.serving.guards.admission import Place
from jengine.serving.http import parts, replies
from jengine.serving.http.bodies import CHAT
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.chat_request import Chat, call_id, reason
from jengine.serving.http.chat_stream import ChatStream
from jengine.serving.http.parameters import chat_params
from jengine.serving.http.parts import Parts, array, with_members
from jengine.serving.http.plain_tools import shows_tools, with_tools_as_text
from jengine.serving.http.service import (
    HttpService,
    check_conversation,
    level_of,
    present,
    stop_reason,
    tokens_of,
)
from jengine.serving.http.tool_choice import read_tools
from jengine.serving.parsers.events import Arguments, Content, Reasoning, ToolCallStart
from jengine.serving.requests.answers import Answer
from jengine.serving.requests.service import Conversation, ParsedRequest
from jengine.serving.requests.tracking import TrackedRequest

OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")


class ChatService(HttpService):
    """Answers conversations."""

    PATH = "/v1/chat/completions"

    async def _create(self, call: HttpCall, given: dict[str, Any], size: int, request_id: str) -> None:
        with self._tracker.track(f"POST {self.PATH}", request_id, call) as tracked:
            self._admission.stream(call)
            chat = await self._chat(call, given, tracked)
            with self._admission.place(chat.params.n, call) as place:
                tracked.place = place
                if chat.body.get("stream"):
                    await self._stream(call, chat, size, tracked, place)
                else:
                    await self._whole(call, chat, size, tracked, place)

    async def _chat(self, call: HttpCall, given: dict[str, Any], tracked: TrackedRequest) -> Chat:
        body, model = self._read(CHAT, given, call, tracked)
        check_conversation(body)
        llm = self._models.llm
        tokenizer = model.tokenizer(llm)
        form = await self._answer_format(tokenizer)
        shown = shows_tools(tokenizer, body.get("chat_template"))
        tools = read_tools(body, form, shown)
        params = self._bounds.params(tools.constrain(chat_params(body, llm.get_default_sampling_params())))
        if form.shows_special_tokens and (tools.callable or form.channels) and tools.forced is None:
            params = params.clone(skip_special_tokens=False)
        return Chat(body, params, tools, form, llm, int(time.time()), model, shown)

    async def _queue(
        self, call: HttpCall, chat: Chat, size: int, kind: OutputKind, request_id: str, place: Place
    ) -> tuple[RequestHandle, Chat]:
        """Renders the prompt and queues the request."""
        body = chat.body
        options = {name: body.get(name) for name in OPTIONS if body.get(name) is not None}
        if (effort := body.get("reasoning_effort")) is not None:
            # Clients send it to every model. Templates ignore variables that they do not know.
            options["chat_template_kwargs"] = {
                "reasoning_effort": effort,
                **options.get("chat_template_kwargs", {}),
            }
        if chat.tools.shown and chat.template_has_tools:
            options["tools"] = chat.tools.shown

        def read() -> Conversation:
            plain = chat.tools.shown and not chat.template_has_tools
            return with_tools_as_text(body.get("messages"), chat.tools) if plain else body.get(
                "messages"
            ), options

        prompt = await self._render(
            chat.model.tokenizer(chat.llm), read, body.get("chat_template"), size, call
        )
        chat = chat.rendered(prompt)
        parsed = ParsedRequest(chat.params, lambda: prompt, size, **level_of(body), lora=chat.model.lora)
        return await self._submit(chat.llm, parsed, kind, call, request_id, place), chat

    # --- complete ---------------------------------------------------------------------------------

    async def _whole(
        self, call: HttpCall, chat: Chat, size: int, tracked: TrackedRequest, place: Place
    ) -> None:
        handle, chat = await self._queue(call, chat, size, "final", tracked.request_id, place)
        with Answer(handle, tracked) as answer:
            output = await answer.next()
        portioned = self._shared.portions.answer()
        reply = replies.ChatCompletion(
            id=f"chatcmpl-{tracked.request_id}",
            object="chat.completion",
            created=chat.created,
            model=chat.model.name,
            usage=replies.usage(output, tokens_of(output.outputs)),
        )
        choices = [await self._choice(chat, completion, portioned) for completion in output.outputs]
        facts = await chat.prompt_facts(output, portioned)
        text = with_members(parts.of(reply), {"choices": array(choices), **facts})
        await call.answer(200, text, id_headers(tracked.request_id))

    async def _choice(self, chat: Chat, completion: CompletionOutput, portioned: Portioned) -> Parts:
        events = chat.shown(chat.read(completion.text))
        names = {event.index: event.name for event in events if isinstance(event, ToolCallStart)}
        arguments = dict.fromkeys(names, "")
        for event in events:
            if isinstance(event, Arguments):
                arguments[event.index] += event.text
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [
            ChatCompletionMessageFunctionToolCall(
                id=call_id(), type="function", function=Function(name=name, arguments=arguments[index])
            )
            for index, name in names.items()
            if chat.tools.parallel or not index
        ]
        choice = replies.ChatChoice(
            index=completion.index,
            message=replies.Message(
                role="assistant",
                content=content or (None if calls else ""),
                **present(reasoning_content=reasoning, tool_calls=calls),
            ),
            finish_reason=reason(completion, bool(calls)),
            **stop_reason(completion),
        )
        return with_members(
            parts.of(choice), {**await chat.logprobs(completion, portioned), **chat.ids(completion)}
        )

    # --- streamed ---------------------------------------------------------------------------------

    async def _stream(
        self, call: HttpCall, chat: Chat, size: int, tracked: TrackedRequest, place: Place
    ) -> None:
        handle, chat = await self._queue(call, chat, size, "delta", tracked.request_id, place)
        with Answer(handle, tracked, self._pace) as answer:
            await call.start_events(id_headers(tracked.request_id))
            stream = ChatStream(
                call, chat, f"chatcmpl-{tracked.request_id}", handle.output, self._shared.portions.answer()
            )
            await stream.start()
            while not stream.finished:
                await stream.show(await answer.next())
        await stream.end()
