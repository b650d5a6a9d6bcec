"""Responses and the items of their output, as JSON."""

from __future__ import annotations

from typing import Any, Literal

from openai.types.shared import ErrorObject

from jengine import CompletionOutput, RequestOutput
from jengine.serving.http.blocks import Block, BlockReader, Blocks
from jengine.serving.http.chat_request import Chat

Status = Literal["in_progress", "completed", "incomplete"]
TYPES = {"text": "output_text", "reasoning": "reasoning_text"}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def item_id(block: Block) -> str:
    return f"{PREFIXES[block.kind]}_{block.id}"


def part(block: Block, text: str) -> dict[str, Any]:
    """The content of a message or of reasoning."""
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": TYPES[block.kind], "text": text, **more}


def item(block: Block, status: Status) -> dict[str, Any]:
    """An item of the output. One in progress has no content yet."""
    head, begun = {"id": item_id(block), "status": status}, status != "in_progress"
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text if begun else ""}
        return {"type": "function_call", **head, **call}
    content = [part(block, block.text)] if begun else []
    if block.kind == "reasoning":
        return {"type": "reasoning", **head, "summary": [], "content": content}
    return {"type": "message", **head, "role": "assistant", "content": content}


def response(chat: Chat, request_id: str, **more: Any) -> dict[str, Any]:
    """A response: the request's parameters, and `more`."""
    own, params = chat.own, chat.params
    given: dict[str, Any] = {
        "instructions": own.get("instructions"),
        "max_output_tokens": own.get("max_output_tokens"),
        "metadata": own.get("metadata", {}),
        "parallel_tool_calls": own.get("parallel_tool_calls", True),
        "reasoning": {"effort": None, "summary": None, **own.get("reasoning", {})},
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **own.get("text", {})},
        "tool_choice": own.get("tool_choice", "auto"),
        "tools": [{"parameters": None, "strict": None, **tool} for tool in own.get("tools", [])],
        "top_p": params.top_p,
    }
    fixed = {"background": False, "previous_response_id": None, "store": False, "truncation": "disabled"}
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": chat.created,
        "model": chat.model.name,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **given,
        **fixed,
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
    state: dict[str, Any] = {"status": "completed"}
    if reason == "length":
        state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    items = _items(blocks, cut=reason != "stop")
    usage = await _usage(chat, output, blocks, tokens)
    return response(chat, request_id, **state, output=items, usage=usage)


async def failed(chat: Chat, request_id: str, reader: BlockReader, error: ErrorObject) -> dict[str, Any]:
    """A response that has failed after it had begun: what was shown of it."""
    shown = {"code": error.code or "server_error", "message": error.message}
    usage = None if reader.last is None else await _usage(chat, reader.last, reader.blocks, reader.tokens)
    items = _items(reader.blocks, cut=True)
    return response(chat, request_id, status="failed", error=shown, output=items, usage=usage)


def _items(blocks: Blocks, cut: bool) -> list[dict[str, Any]]:
    items = [item(block, "completed") for block in blocks.all]
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
