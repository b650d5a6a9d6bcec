"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

from typing import Any

import msgspec

from jengine import RequestOutput
from jengine.serving.calls.portions import Portioned
from jengine.serving.http import parts
from jengine.serving.http.blocks import Block, BlockReader, Step, blocks_of
from jengine.serving.http.calls import HttpCall, id_headers
from jengine.serving.http.chat_api import Asked
from jengine.serving.http.chat_request import Chat
from jengine.serving.http.errors import HttpError
from jengine.serving.http.parts import Parts
from jengine.serving.http.responses.body import read
from jengine.serving.http.responses.objects import TYPES, ended, failed, item, item_id, part, response
from jengine.serving.requests.endings import Aborts

CALL = "function_call_arguments"


class Responses:
    """A ChatApi."""

    path = "/v1/responses"
    aborts: Aborts = "none"

    def read(self, given: dict[str, Any]) -> Asked:
        return read(given)

    def headers(self, request_id: str) -> dict[str, str]:
        return id_headers(request_id)

    async def whole(self, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned) -> Parts:
        [completion] = output.outputs
        blocks = blocks_of(chat.read(completion.text))
        tokens = len(completion.token_ids)
        return parts.encoded(await ended(chat, request_id, output, completion, blocks, tokens))

    def stream(
        self, call: HttpCall, chat: Chat, output: RequestOutput, request_id: str, portioned: Portioned
    ) -> ResponseStream:
        return ResponseStream(call, chat, request_id)


class ResponseStream:
    """An AnswerStream."""

    def __init__(self, call: HttpCall, chat: Chat, request_id: str) -> None:
        self._call, self._chat, self._id, self._reader = call, chat, request_id, BlockReader(chat)
        self.finished = False
        call.end_failed = self._fail

    async def start(self) -> None:
        for kind in ("created", "in_progress"):
            await self._send(f"response.{kind}", response=response(self._chat, self._id))

    async def show(self, output: RequestOutput) -> None:
        steps = self._reader.take(output)
        self.finished = output.finished
        for step in steps:
            await self._show(step)

    async def _show(self, step: Step) -> None:
        block = step.block
        if step.what == "opens":
            await self._send(
                "response.output_item.added", output_index=block.index, item=item(block, "in_progress")
            )
            if block.kind != "call":
                await self._send_of(block, "content_part.added", part=part(block, ""))
        elif step.what == "grows":
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            await self._send_of(block, f"{TYPES.get(block.kind, CALL)}.delta", delta=step.text, **more)
        else:
            await self._close(block)

    async def _close(self, block: Block) -> None:
        if block.kind == "call":
            await self._send_of(block, f"{CALL}.done", arguments=block.text, name=block.name)
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            await self._send_of(block, f"{TYPES[block.kind]}.done", text=block.text, **more)
            await self._send_of(block, "content_part.done", part=part(block, block.text))
        cut = self.finished and self._reader.blocks.all[-1] is block and self._reason != "stop"
        shown = item(block, "incomplete" if cut else "completed")
        await self._send("response.output_item.done", output_index=block.index, item=shown)

    @property
    def _reason(self) -> str | None:
        completion = self._reader.completion
        return None if completion is None else completion.finish_reason

    async def _fail(self, error: HttpError) -> None:
        last = await failed(self._chat, self._id, self._reader, error.error)
        await self._send("response.failed", response=last)
        await self._call.end_events(b"")

    async def end(self) -> None:
        reader = self._reader
        assert reader.last is not None and reader.completion is not None
        last = await ended(self._chat, self._id, reader.last, reader.completion, reader.blocks, reader.tokens)
        await self._send(f"response.{last['status']}", response=last)
        await self._call.end_events(b"")

    async def _send_of(self, block: Block, kind: str, **fields: Any) -> None:
        """Sends an event about an item."""
        place = {} if block.kind == "call" else {"content_index": 0}
        await self._send(
            f"response.{kind}", item_id=item_id(block), output_index=block.index, **place, **fields
        )

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._call.events, **fields}
        await self._call.event([msgspec.json.encode(event)], kind)
