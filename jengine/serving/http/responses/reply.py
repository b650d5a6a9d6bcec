"""Answers in the form of OpenAI's Responses API."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from jengine import CompletionOutput, RequestOutput
from jengine.serving.calls.portions import Parts
from jengine.serving.http.blocks import Block, BlockReader, Blocks, Step
from jengine.serving.http.calls import HttpCall
from jengine.serving.http.chat_service import Chat, ChatApi, ChatInput
from jengine.serving.http.errors import HttpError
from jengine.serving.http.replies import TokenTexts, token_entries
from jengine.serving.http.responses.body import STORED_INPUT, ToolName, Tools, read
from jengine.serving.http.responses.earlier import ResponseStore, StoredResponse
from jengine.serving.requests.answers import Aborts

Token = tuple[int, msgspec.Raw | None]  # its number of characters, and its entry if it is to be shown
Status = Literal["in_progress", "completed", "incomplete"]
TYPES = {"text": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
SERVICE_TIER = "default"  # the only one
# Clients may send other words, which have no effect, but the schema of answers has only these.
SUMMARIES, VERBOSITIES = ("auto", "concise", "detailed"), ("low", "medium", "high")
FUNCTION, CUSTOM = "function_call_arguments", "custom_tool_call_input"


class LogprobReader(BlockReader):
    """Reads outputs token by token, and gives blocks of text the log probabilities of their tokens."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        tokenizer, hides = chat.llm.tokenizer, chat.params.skip_special_tokens
        self._texts = TokenTexts(tokenizer, as_ids=False)
        self._hidden = tokenizer.special_ids if hides else frozenset[int]()
        self._detokenizer = tokenizer.detokenizer(hides)
        self._coming: deque[Token] = deque()  # whose text has not come yet
        self._parsed: list[Token] = []  # whose text no block has yet

    async def take(self, output: RequestOutput) -> list[Step]:
        portions, top = self._chat.portions, self._chat.body.get("top_logprobs", 0)
        for completion in output.outputs:
            entries = await token_entries(portions, completion.logprobs or (), top, self._texts)
            for token, entry in zip(completion.token_ids, entries, strict=True):
                size = len(self._detokenizer.push([token]))
                self._coming.append((size, None if token in self._hidden else entry))
        return await super().take(output)

    def _read(self, completion: CompletionOutput) -> list[Step]:
        steps = []
        for text in self._pieces(completion.text):
            steps += self._push(text, ended=False)
        return [*steps, *(self._push("", ended=True) if completion.finish_reason is not None else ())]

    def _push(self, text: str, ended: bool) -> list[Step]:
        steps = super()._push(text, ended)
        size = sum(len(step.text) for step in steps)
        tokens = self._last_tokens(size) if size else deque()
        return [self._with_logprobs(step, tokens) for step in steps]

    def _with_logprobs(self, step: Step, tokens: deque[Token]) -> Step:
        """The step with those of the next tokens that it takes."""
        size, entries = len(step.text), []
        while tokens and size > 0:
            length, entry = tokens.popleft()
            size -= length
            entries += [] if entry is None else [entry]
        if step.block.kind != "text":
            return step
        step.block.logprobs += entries
        return step._replace(logprobs=entries)

    def _pieces(self, text: str) -> Iterator[str]:
        """The text by tokens. A text may end before its tokens do, at a stop string."""
        while text and self._coming:
            size, entry = self._coming.popleft()
            self._parsed.append((min(size, len(text)), entry))
            if size > len(text):
                self._coming.appendleft((size - len(text), None))
            if size:
                yield text[:size]
            text = text[size:]
        if text:
            yield text

    def _last_tokens(self, size: int) -> deque[Token]:
        """The last tokens whose text has been parsed, as many as have `size` characters. Forgets those
        before, which were markers.
        """
        first = len(self._parsed)
        while first and (size > 0 or not self._parsed[first - 1][0]):
            first -= 1
            size -= self._parsed[first][0]
        tokens, self._parsed = deque(self._parsed[first:]), []
        return tokens


def tool_of(chat: Chat, block: Block) -> ToolName:
    """The tool that a call names. The model may also name others."""
    tools: Tools = chat.request["tools"]
    return tools.names.get(block.name, ToolName(block.name))


def item_id(chat: Chat, block: Block) -> str:
    custom = block.kind == "call" and tool_of(chat, block).custom
    return f"{'ctc' if custom else PREFIXES[block.kind]}_{block.id}"


def custom_input(chat: Chat, block: Block) -> str:
    """The text that a call gives to a custom tool."""
    tools: Tools = chat.request["tools"]
    return tools.input_of(block.name, block.text)


def part(block: Block, text: str, logprobs: Sequence[msgspec.Raw] = ()) -> dict[str, Any]:
    """The content of a message or of reasoning."""
    more: dict[str, Any] = {"annotations": [], "logprobs": logprobs} if block.kind == "text" else {}
    return {"type": TYPES[block.kind], "text": text, **more}


def item(chat: Chat, block: Block, status: Status) -> dict[str, Any]:
    """An item of the output. One in progress has no content yet."""
    head, begun = {"id": item_id(chat, block), "status": status}, status != "in_progress"
    if block.kind == "call":
        tool = tool_of(chat, block)
        call = {"call_id": f"call_{block.id}", "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.custom:
            text = custom_input(chat, block) if begun else ""
            return {"type": "custom_tool_call", **head, **call, "input": text}
        return {"type": "function_call", **head, **call, "arguments": block.text if begun else ""}
    content = [part(block, block.text, block.logprobs)] if begun else []
    if block.kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": content}
    return {"type": "message", **head, "role": "assistant", "content": content}


def response(chat: Chat, **more: Any) -> dict[str, Any]:
    """A response: the request's parameters, and `more`."""
    request, params = chat.request, chat.params
    form = request.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "json_schema":
        form = {"name": "", "description": None, "strict": False, **form}
    hints = {**request.get("text", {}), **request.get("reasoning", {})}
    summary, verbosity = (hints.get(name) for name in ("summary", "verbosity"))
    echoed = (
        "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
        "safety_identifier", "user",
    )  # fmt: skip
    return {
        "id": f"resp_{chat.request_id}",
        "object": "response",
        "created_at": chat.created,
        "completed_at": None,
        "model": chat.model.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **{name: request.get(name) for name in echoed},
        "metadata": request.get("metadata", {}),
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "reasoning": {"effort": hints.get("effort"), "summary": summary if summary in SUMMARIES else None},
        "store": request["store"],
        "text": {"format": form, **({"verbosity": verbosity} if verbosity in VERBOSITIES else {})},
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": request["tools"].shown,
        "top_logprobs": request.get("top_logprobs", 0),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "background": False,
        "service_tier": SERVICE_TIER,
        "truncation": "disabled",
        **more,
    }


def reader_of(chat: Chat) -> BlockReader:
    return BlockReader(chat) if chat.params.logprobs is None else LogprobReader(chat)


async def ended(chat: Chat, reader: BlockReader) -> dict[str, Any]:
    """A response that has ended."""
    assert reader.completion is not None
    reason = reader.completion.finish_reason
    state: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
    if reason == "length":
        state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    items, usage = _items(chat, reader.blocks, cut=reason != "stop"), await _usage(chat, reader)
    return response(chat, **state, output=items, usage=usage)


async def failed(chat: Chat, reader: BlockReader, error: HttpError) -> dict[str, Any]:
    """A response that has failed after it had begun: what was shown of it."""
    shown = {"code": error.code or "server_error", "message": error.message}
    usage = None
    with contextlib.suppress(Exception):  # another error must not hide this one
        usage = await _usage(chat, reader)
    items = _items(chat, reader.blocks, cut=True)
    return response(chat, status="failed", error=shown, output=items, usage=usage)


def _items(chat: Chat, blocks: Blocks, cut: bool) -> list[dict[str, Any]]:
    items = [item(chat, block, "completed") for block in blocks.all]
    if cut and items:
        items[-1]["status"] = "incomplete"
    return items


async def _usage(chat: Chat, reader: BlockReader) -> dict[str, Any]:
    output, tokens = reader.last, reader.tokens
    assert output is not None
    prompt, reasoning = len(output.prompt_token_ids), await chat.count_tokens(reader.blocks.text("reasoning"))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, tokens)},
        "total_tokens": prompt + tokens,
    }


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

    async def begin_too_long(self, call: HttpCall, chat: Chat) -> None:
        """Fail in the stream, as OpenAI's server: after a 400, Codex would not shorten its conversation."""
        await call.start_events(self.headers(chat))
        await ResponseStream(call, chat, self._store).start()

    async def whole(self, chat: Chat, output: RequestOutput) -> Parts:
        reader = reader_of(chat)
        await reader.take(output)
        return [keep(self._store, chat, await ended(chat, reader))]

    def stream(self, call: HttpCall, chat: Chat, output: RequestOutput) -> ResponseStream:
        return ResponseStream(call, chat, self._store)


class ResponseStream:
    """An AnswerStream."""

    def __init__(self, call: HttpCall, chat: Chat, store: ResponseStore) -> None:
        self._call, self._chat, self._store = call, chat, store
        self._reader, self.finished = reader_of(chat), False
        call.end_failed = self._fail

    async def start(self) -> None:
        for kind in ("created", "in_progress"):
            await self._send(f"response.{kind}", response=response(self._chat))

    async def show(self, output: RequestOutput) -> None:
        steps = await self._reader.take(output)
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
        elif block.kind != "call":
            more: dict[str, Any] = {"logprobs": step.logprobs} if block.kind == "text" else {}
            await self._send_of(block, f"{TYPES[block.kind]}.delta", delta=step.text, **more)
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
        last = await failed(self._chat, self._reader, error)
        await self._send("response.failed", response=last)
        await self._call.end_events(b"")

    async def end(self) -> None:
        last = await ended(self._chat, self._reader)
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
