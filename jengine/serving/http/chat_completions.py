"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Parts, array, encoded, with_members
from jengine.serving.http import policy, replies
from jengine.serving.http.blocks import Blocks
from jengine.serving.http.bodies import CHAT, NEUTRAL
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_service import Chat, ChatApi, ChatInput, call_id, reason
from jengine.serving.http.parameters import names_of, with_thinking
from jengine.serving.http.policy import check_fields, log_accepted
from jengine.serving.http.service import StreamUsage, present, stop_reason, transfer_facts
from jengine.serving.parsers.events import Arguments, Content, Event, Reasoning, ToolCallStart, joined
from jengine.serving.requests.answers import Aborts
from jengine.serving.requests.tracking import tokens_of


class ChatCompletions(ChatApi):
    """The ChatApi of /v1/chat/completions."""

    path = "/v1/chat/completions"
    aborts: Aborts = "asked for"

    def read(self, json_body: dict[str, Any]) -> ChatInput:
        check_fields(policy.CHAT, json_body, NEUTRAL)
        log_accepted(self.path, json_body)
        body, names = with_thinking(CHAT.read(json_body))
        return ChatInput(body, names | names_of(body), body.fields)

    async def whole(self, chat: Chat, output: RequestOutput) -> Parts:
        usage = replies.usage(output, tokens_of(output))
        choices = [await self._choice(chat, completion) for completion in output.outputs]
        facts = await chat.prompt_facts(output)
        facts |= transfer_facts(chat.body, chat.model)
        reply = encoded({**_head(chat, "chat.completion"), "usage": usage})
        return with_members(reply, {"choices": array(choices), **facts})

    async def _choice(self, chat: Chat, completion: CompletionOutput) -> Parts:
        blocks = Blocks(chat.read(completion.text))
        content, reasoning = blocks.text("text"), blocks.text("reasoning")
        calls = [
            {"id": call_id(), "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in blocks.all
            if block.kind == "call"
        ]
        choice = {
            "index": completion.index,
            "message": {
                "role": "assistant",
                "content": content or (None if calls else ""),
                **present(reasoning_content=reasoning, tool_calls=calls),
            },
            "finish_reason": reason(completion, bool(calls)),
            **stop_reason(completion),
        }
        return with_members(encoded(choice), {**await chat.logprobs(completion), **chat.ids(completion)})

    def stream(self, call: HttpCall, chat: Chat, output: RequestOutput) -> ChatStream:
        return ChatStream(call, chat, output)


def _head(chat: Chat, kind: str) -> dict[str, Any]:
    """What an answer and each of its events have."""
    return {
        "id": f"chatcmpl-{chat.request_id}",
        "object": kind,
        "created": chat.created,
        "model": chat.model.name,
    }


class ChatStream:
    """A streamed answer to a conversation."""

    def __init__(self, call: HttpCall, chat: Chat, output: RequestOutput) -> None:
        self._call, self._chat, self._usage = call, chat, StreamUsage(chat.body)
        self._parsers = [chat.parser() for _ in range(chat.params.n)]
        self._called = [False] * chat.params.n
        self._ended: set[int] = set()
        self._facts: dict[str, Parts] = {}  # that no event has had
        self._last, self._tokens, self.finished = output, 0, False
        self._head = encoded(_head(chat, "chat.completion.chunk"))

    async def start(self) -> None:
        """Sends the role for each completion, as OpenAI does."""
        for index in range(self._chat.params.n):
            role = {"role": "assistant", "content": ""}
            await self._send([encoded({"index": index, "delta": role, "finish_reason": None})], {})

    async def show(self, output: RequestOutput) -> None:
        """Sends new output."""
        if not self._tokens:
            self._facts = await self._chat.prompt_facts(output)
        self._last, self.finished = output, output.finished
        self._tokens += tokens_of(output)
        for completion in output.outputs:
            # one at a time, since many clients read only the first
            for choice in await self._choices(completion):
                facts, self._facts = self._facts, {}
                await self._send([choice], facts)

    async def _choices(self, completion: CompletionOutput) -> list[Parts]:
        index = completion.index
        if index in self._ended:
            return []
        parser = self._parsers[index]
        events = parser.push(completion.text)
        ended = completion.finish_reason is not None
        if ended:
            self._ended.add(index)
            events = joined([*events, *parser.finish()])
        deltas = self._deltas(self._chat.shown(events), index)
        more = {
            **await self._chat.logprobs(completion),
            **(self._chat.ids(completion) if completion.token_ids else {}),
        }
        if not deltas and not ended and not more:
            return []
        why = reason(completion, self._called[index]) if ended else None
        ending = stop_reason(completion) if ended else {}
        *before, last = deltas or [{}]
        choice = {"index": index, "delta": last, "finish_reason": why, **ending}
        earlier = ({"index": index, "delta": delta, "finish_reason": None} for delta in before)
        return [*map(encoded, earlier), with_members(encoded(choice), more)]

    def _deltas(self, events: list[Event], index: int) -> list[dict[str, Any]]:
        """One for each call: many clients read only the first entry of tool_calls."""
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = list[dict[str, Any]]()
        for event in events:
            if isinstance(event, Arguments) and calls and calls[-1]["index"] == event.index:
                calls[-1]["function"]["arguments"] += event.text
            elif isinstance(event, ToolCallStart | Arguments):
                calls.append(_call_delta(event))
        self._called[index] = self._called[index] or bool(calls)
        first = present(content=content, reasoning_content=reasoning, tool_calls=calls[:1])
        return [first, *({"tool_calls": [call]} for call in calls[1:])] if first else []

    async def end(self) -> None:
        if self._usage.final:
            usage = {"usage": encoded(replies.usage(self._last, self._tokens))}
            await self._call.event(with_members(self._head, {"choices": array([]), **usage}))
        await self._call.end_events()

    async def _send(self, choices: list[Parts], facts: dict[str, Parts]) -> None:
        usage = self._usage.during(lambda: replies.usage(self._last, self._tokens))
        await self._call.event(with_members(self._head, {"choices": array(choices), **facts, **usage}))


def _call_delta(event: ToolCallStart | Arguments) -> dict[str, Any]:
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": call_id(), "type": "function", "function": function}
    return {"index": event.index, "function": {"arguments": event.text}}
