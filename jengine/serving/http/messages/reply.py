"""Answers in Anthropic's form."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Parts, encoded
from jengine.serving.http.blocks import Block, BlockReader, Blocks, Step
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_service import Chat, ChatApi, ChatInput
from jengine.serving.http.messages.body import read
from jengine.serving.requests.answers import Aborts

DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
DELTAS["call"] = ("input_json_delta", "partial_json")


class Messages(ChatApi):
    """The ChatApi of /v1/messages."""

    path = "/v1/messages"
    aborts: Aborts = "none"

    def read(self, json_body: dict[str, Any]) -> ChatInput:
        return read(json_body)

    def headers(self, chat: Chat) -> dict[str, str]:
        headers = super().headers(chat)
        return {**headers, "request-id": chat.request_id} if headers else headers

    async def whole(self, chat: Chat, output: RequestOutput) -> Parts:
        [completion] = output.outputs
        blocks, tokens = Blocks(chat.read(completion.text)), len(completion.token_ids)
        cut = blocks.all[-1:] if completion.finish_reason == "length" else []
        content = [shown for block in blocks.all if (shown := _whole(block, block in cut)) is not None]
        called = any(shown["type"] == "tool_use" for shown in content)
        return encoded(
            {
                **_head(chat),
                "content": content,
                **_stop(chat, completion, called, tokens),
                "usage": await _usage(chat, output, blocks, tokens),
            }
        )

    def stream(self, call: HttpCall, chat: Chat, output: RequestOutput) -> MessagesStream:
        return MessagesStream(call, chat)


class MessagesStream:
    """An AnswerStream. It begins with the first output, which tells how much of the prompt was cached."""

    def __init__(self, call: HttpCall, chat: Chat) -> None:
        self._call, self._chat, self._reader, self.finished = call, chat, BlockReader(chat), False

    async def start(self) -> None:
        pass

    async def show(self, output: RequestOutput) -> None:
        if self._reader.last is None:
            usage = await _usage(self._chat, output, self._reader.blocks, 0)
            nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            message = {**_head(self._chat), **nothing, "usage": usage}
            await self._send("message_start", message=message)
            await self._send("ping")
        for step in await self._reader.take(output):
            await self._show(step)
        self.finished = output.finished

    async def _show(self, step: Step) -> None:
        block = step.block
        if step.what == "opens":
            await self._send("content_block_start", index=block.index, content_block=_opened(block))
        elif step.what == "grows":
            kind, field = DELTAS[block.kind]
            await self._send("content_block_delta", index=block.index, delta={"type": kind, field: step.text})
        else:
            await self._send("content_block_stop", index=block.index)

    async def end(self) -> None:
        reader, chat = self._reader, self._chat
        assert reader.last is not None and reader.completion is not None
        usage = await _usage(chat, reader.last, reader.blocks, reader.tokens)
        delta = _stop(chat, reader.completion, reader.blocks.called, reader.tokens)
        await self._send("message_delta", delta=delta, usage=usage)
        await self._send("message_stop")
        await self._call.end_events(b"")

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._call.event([msgspec.json.encode({"type": kind, **fields})], kind)


def _head(chat: Chat) -> dict[str, Any]:
    return {"id": f"msg_{chat.request_id}", "type": "message", "role": "assistant", "model": chat.model.name}


def _opened(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": {}}


def _whole(block: Block, cut: bool) -> dict[str, Any] | None:
    """A complete block: text for a call whose arguments are not an object, None if such a call was cut off
    or has none.
    """
    if block.kind == "call":
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return {**_opened(block), "input": msgspec.json.decode(block.text, type=dict[str, Any])}
        return None if cut or not block.text else {"type": "text", "text": block.text}
    return {**_opened(block), "thinking" if block.kind == "reasoning" else "text": block.text}


def _stop(chat: Chat, completion: CompletionOutput, called: bool, tokens: int) -> dict[str, Any]:
    """Why the answer ended. `called`: whether it has a tool_use block."""
    limit, sequence = chat.params.max_tokens, None
    if completion.finish_reason == "length":
        full = limit is not None and tokens < limit
        why = "model_context_window_exceeded" if full else "max_tokens"
    elif called:
        why = "tool_use"
    elif isinstance(completion.stop_reason, str):
        why, sequence = "stop_sequence", completion.stop_reason
    else:
        why = "end_turn"
    return {"stop_reason": why, "stop_sequence": sequence}


async def _usage(chat: Chat, output: RequestOutput, blocks: Blocks, tokens: int) -> dict[str, Any]:
    """Tokens. In Anthropic's API, cached ones are not among input_tokens."""
    cached = output.num_cached_tokens or 0
    usage: dict[str, Any] = {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens,
    }
    if reasoning := blocks.text("reasoning"):
        usage["output_tokens_details"] = {"thinking_tokens": min(await chat.count_tokens(reasoning), tokens)}
    return usage
