"""Responses and the items of their output, as JSON."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jengine import CompletionOutput, RequestOutput
from jengine.serving.http.blocks import Block, BlockReader, Blocks
from jengine.serving.http.chat_request import Chat
from jengine.serving.http.errors import HttpError
from jengine.serving.http.responses.tools import ToolName, Tools

Status = Literal["in_progress", "completed", "incomplete"]
TYPES = {"text": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
SERVICE_TIER = "default"  # the only one
# Clients may send other words, which have no effect, but the schema of answers has only these.
SUMMARIES, VERBOSITIES = ("auto", "concise", "detailed"), ("low", "medium", "high")


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


def response(chat: Chat, request_id: str, **more: Any) -> dict[str, Any]:
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
        "id": f"resp_{request_id}",
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


async def ended(
    chat: Chat,
    request_id: str,
    output: RequestOutput,
    completion: CompletionOutput,
    blocks: Blocks,
    tokens: int,
) -> dict[str, Any]:
    """A response that has ended."""
    reason = completion.finish_reason
    state: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
    if reason == "length":
        state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    items = _items(chat, blocks, cut=reason != "stop")
    usage = await _usage(chat, output, blocks, tokens)
    return response(chat, request_id, **state, output=items, usage=usage)


async def failed(chat: Chat, request_id: str, reader: BlockReader, error: HttpError) -> dict[str, Any]:
    """A response that has failed after it had begun: what was shown of it."""
    shown = {"code": error.code or "server_error", "message": error.message}
    usage = None
    with contextlib.suppress(Exception):  # another error must not hide this one
        if reader.last is not None:
            usage = await _usage(chat, reader.last, reader.blocks, reader.tokens)
    items = _items(chat, reader.blocks, cut=True)
    return response(chat, request_id, status="failed", error=shown, output=items, usage=usage)


def _items(chat: Chat, blocks: Blocks, cut: bool) -> list[dict[str, Any]]:
    items = [item(chat, block, "completed") for block in blocks.all]
    if cut and items:
        items[-1]["status"] = "incomplete"
    return items


async def _usage(chat: Chat, output: RequestOutput, blocks: Blocks, tokens: int) -> dict[str, Any]:
    prompt, reasoning = len(output.prompt_token_ids), await chat.count_tokens(blocks.text("reasoning"))
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, tokens)},
        "total_tokens": prompt + tokens,
    }
