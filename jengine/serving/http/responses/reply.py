"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import msgspec

from jengine import RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http.blocks import Block, BlockReader, Step, blocks_of
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_request import Chat, ChatApi, ChatInput
from jengine.serving.http.errors import HttpError
from jengine.serving.http.parts import Parts
from jengine.serving.http.responses.body import STORED_INPUT, read
from jengine.serving.http.responses.logprobs import LogprobReader
from jengine.serving.http.responses.objects import (
    TYPES,
    custom_input,
    ended,
    failed,
    item,
    item_id,
    part,
    response,
    tool_of,
)
from jengine.serving.http.responses.store import ResponseStore, StoredResponse
from jengine.serving.requests.answers import Aborts

FUNCTION, CUSTOM = "function_call_arguments", "custom_tool_call_input"


class Responses(ChatApi):
    """The ChatApi of /v1/responses.

    Args:
        store: keeps the answers.
    """

    path = "/v1/responses"
    aborts: Aborts = "none"

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def read(self, body: dict[str, Any]) -> ChatInput:
        return read(body, self._store.on)

    async def begin_too_long(self, call: HttpCall, chat: Chat, request_id: str, portioned: Portioned) -> None:
        """As OpenAI's server: Codex shortens its conversation after `response.failed`, not after a 400."""
        await call.start_events(self.headers(request_id))
        await ResponseStream(call, chat, request_id, portioned, self._store).start()

    async def whole(self, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned) -> Parts:
        [completion] = output.outputs
        if completion.logprobs is None:
            blocks = blocks_of(chat.read(completion.text))
        else:
            reader = LogprobReader(chat)
            await reader.expect(output, portioned)
            reader.take(output)
            blocks = reader.blocks
        tokens = len(completion.token_ids)
        answer = await ended(chat, request_id, output, completion, blocks, tokens)
        return [keep(self._store, chat, answer)]

    def stream(
        self, call: HttpCall, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned
    ) -> ResponseStream:
        return ResponseStream(call, chat, request_id, portioned, self._store)


class ResponseStream:
    """An AnswerStream."""

    def __init__(
        self, call: HttpCall, chat: Chat, request_id: str, portioned: Portioned, store: ResponseStore
    ) -> None:
        self._call, self._chat, self._id, self._store = call, chat, request_id, store
        self._reader = BlockReader(chat) if chat.params.logprobs is None else LogprobReader(chat)
        self._portioned = portioned
        self.finished = False
        call.end_failed = self._fail

    async def start(self) -> None:
        for kind in ("created", "in_progress"):
            await self._send(f"response.{kind}", response=response(self._chat, self._id))

    async def show(self, output: RequestOutput) -> None:
        if isinstance(self._reader, LogprobReader):
            await self._reader.expect(output, self._portioned)
        steps = self._reader.take(output)
        self.finished = output.finished
        for step in steps:
            await self._show(step)

    async def _show(self, step: Step) -> None:
        block = step.block
        if step.what == "opens":
            added = item(self._chat, block, "in_progress")
            await self._send("response.output_item.added", output_index=block.index, item=added)
            if block.kind != "call":
                await self._send_of(block, "content_part.added", part=part(block, ""))
        elif step.what == "closes":
            await self._close(block)
        elif block.kind == "text":
            kind = f"{TYPES['text']}.delta"
            await self._send_of(block, kind, delta=step.text, logprobs=step.logprobs)
        elif block.kind == "reasoning":
            await self._send_of(block, f"{TYPES['reasoning']}.delta", delta=step.text)
        elif not tool_of(self._chat, block).custom:  # whose input is within the arguments
            await self._send_of(block, f"{FUNCTION}.delta", delta=step.text)

    async def _close(self, block: Block) -> None:
        if block.kind != "call":
            more: dict[str, Any] = {"logprobs": block.logprobs} if block.kind == "text" else {}
            await self._send_of(block, f"{TYPES[block.kind]}.done", text=block.text, **more)
            closed = part(block, block.text, block.logprobs)
            await self._send_of(block, "content_part.done", part=closed)
        elif tool_of(self._chat, block).custom:
            text = custom_input(self._chat, block)
            await self._send_of(block, f"{CUSTOM}.delta", delta=text)
            await self._send_of(block, f"{CUSTOM}.done", input=text)
        else:
            name = tool_of(self._chat, block).name
            await self._send_of(block, f"{FUNCTION}.done", arguments=block.text, name=name)
        cut = self.finished and self._reader.blocks.all[-1] is block and self._reason != "stop"
        shown = item(self._chat, block, "incomplete" if cut else "completed")
        await self._send("response.output_item.done", output_index=block.index, item=shown)

    @property
    def _reason(self) -> str | None:
        completion = self._reader.completion
        return None if completion is None else completion.finish_reason

    async def _fail(self, error: HttpError) -> None:
        last = await failed(self._chat, self._id, self._reader, error)
        await self._send("response.failed", response=last)
        await self._call.end_events(b"")

    async def end(self) -> None:
        reader = self._reader
        assert reader.last is not None and reader.completion is not None
        last = await ended(self._chat, self._id, reader.last, reader.completion, reader.blocks, reader.tokens)
        text = keep(self._store, self._chat, last)
        await self._send(f"response.{last['status']}", response=msgspec.Raw(text))
        await self._call.end_events(b"")

    async def _send_of(self, block: Block, kind: str, **fields: Any) -> None:
        """Sends an event about an item."""
        place = {} if block.kind == "call" else {"content_index": 0}
        await self._send(
            f"response.{kind}",
            item_id=item_id(self._chat, block),
            output_index=block.index,
            **place,
            **fields,
        )

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._call.events, **fields}
        await self._call.event([msgspec.json.encode(event)], kind)


def keep(store: ResponseStore, chat: Chat, answer: dict[str, Any]) -> bytes:
    """An answer as JSON, which the store keeps if the client wants that."""
    text = msgspec.json.encode(answer)
    if (before := chat.request.get(STORED_INPUT)) is not None:
        items = tuple(part["id"] for part in answer["output"])
        store.put(StoredResponse(answer["id"], text, before, items))
    return text
