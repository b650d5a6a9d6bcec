"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http import parts, policy, replies
from jengine.serving.http.blocks import blocks_of
from jengine.serving.http.bodies import CHAT, NEUTRAL
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.chat_api import Asked
from jengine.serving.http.chat_request import Chat, call_id, reason
from jengine.serving.http.chat_stream import ChatStream
from jengine.serving.http.parameters import names_of
from jengine.serving.http.parts import Parts, array, with_members
from jengine.serving.http.policy import check_fields, log_accepted
from jengine.serving.http.service import present, stop_reason, tokens_of, transfer_facts
from jengine.serving.http.thinking import with_thinking
from jengine.serving.requests.endings import Aborts


class ChatCompletions:
    """A ChatApi."""

    path = "/v1/chat/completions"
    aborts: Aborts = "asked for"

    def read(self, given: dict[str, Any]) -> Asked:
        check_fields(policy.CHAT, given, NEUTRAL)
        log_accepted(self.path, given)
        body, names = with_thinking(CHAT.read(given))
        return Asked(body, names | names_of(body), body.fields)

    def headers(self, request_id: str) -> dict[str, str]:
        return id_headers(request_id)

    async def whole(self, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned) -> Parts:
        reply = replies.ChatCompletion(
            id=f"chatcmpl-{request_id}",
            object="chat.completion",
            created=chat.created,
            model=chat.model.name,
            usage=replies.usage(output, tokens_of(output.outputs)),
        )
        choices = [await self._choice(chat, completion, portioned) for completion in output.outputs]
        facts = await chat.prompt_facts(output, portioned)
        facts |= transfer_facts(chat.body, chat.model)
        return with_members(parts.of(reply), {"choices": array(choices), **facts})

    async def _choice(self, chat: Chat, completion: CompletionOutput, portioned: Portioned) -> Parts:
        blocks = blocks_of(chat.read(completion.text))
        content, reasoning = blocks.text("text"), blocks.text("reasoning")
        calls = [
            ChatCompletionMessageFunctionToolCall(
                id=call_id(), type="function", function=Function(name=block.name, arguments=block.text)
            )
            for block in blocks.all
            if block.kind == "call"
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

    def stream(
        self, call: HttpCall, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned
    ) -> ChatStream:
        return ChatStream(call, chat, f"chatcmpl-{request_id}", output, portioned)

    async def begin_too_long(self, call: HttpCall, chat: Chat, request_id: str, portioned: Portioned) -> None:
        pass
