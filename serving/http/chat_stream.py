"""A streamed answer to a conversation, as events."""

from __future__ import annotations

from typing import Any

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http import parts, replies
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_request import Chat, call_id, reason
from jengine.serving.http.parts import Parts, array, with_members
from jengine.serving.http.service import StreamUsage, present, stop_reason, tokens_of
from jengine.serving.parsers.events import Arguments, Content, Event, Reasoning, ToolCallStart, joined


class ChatStream:
    """A streamed answer to a conversation."""

    def __init__(
        self, call: HttpCall, chat: Chat, reply_id: str, output: RequestOutput, portioned: Portioned
    ) -> None:
        self._call, self._chat, self._usage, self._portioned = (
            call,
            chat,
            StreamUsage(chat.body),
            portioned,
        )
        self._parsers = [chat.parser() for _ in range(chat.params.n)]
        self._called = [False] * chat.params.n
        self._ended: set[int] = set()
        self._facts: dict[str, Parts] = {}  # that no event has had
        self._last, self._tokens, self.finished = output, 0, False
        self._head = parts.of(
            replies.Chunk(
                id=reply_id, object="chat.completion.chunk", created=chat.created, model=chat.model.name
            )
        )

    async def start(self) -> None:
        """Sends the role for each completion, as OpenAI does."""
        for index in range(self._chat.params.n):
            role = {"role": "assistant", "content": ""}
            await self._send([parts.encoded({"index": index, "delta": role, "finish_reason": None})], {})

    async def show(self, output: RequestOutput) -> None:
        """Sends new output."""
        if not self._tokens:
            self._facts = await self._chat.prompt_facts(output, self._portioned)
        self._last, self.finished = output, output.finished
        self._tokens += tokens_of(output.outputs)
        for completion in output.outputs:
            # one at a time, since many clients read only the first
            if (choice := await self._choice(completion)) is not None:
                facts, self._facts = self._facts, {}
                await self._send([choice], facts)

    async def _choice(self, completion: CompletionOutput) -> Parts | None:
        index = completion.index
        if index in self._ended:
            return None
        parser = self._parsers[index]
        events = parser.push(completion.text)
        ended = completion.finish_reason is not None
        if ended:
            self._ended.add(index)
            events = joined([*events, *parser.finish()])
        delta = self._delta(self._chat.shown(events), index)
        more = {
            **await self._chat.logprobs(completion, self._portioned),
            **(self._chat.ids(completion) if completion.token_ids else {}),
        }
        if delta is None and not ended and not more:
            return None
        why = reason(completion, self._called[index]) if ended else None
        told = stop_reason(completion) if ended else {}
        choice = {"index": index, "delta": delta or {}, "finish_reason": why, **told}
        return with_members(parts.encoded(choice), more)

    def _delta(self, events: list[Event], index: int) -> dict[str, Any] | None:
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [_call_delta(event) for event in events if isinstance(event, ToolCallStart | Arguments)]
        self._called[index] = self._called[index] or bool(calls)
        if not (content or reasoning or calls):
            return None
        return present(content=content, reasoning_content=reasoning, tool_calls=calls)

    async def end(self) -> None:
        if self._usage.final:
            usage = {"usage": parts.of(replies.usage(self._last, self._tokens))}
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
