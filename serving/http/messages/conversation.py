"""Anthropic's messages as those of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.grpc.conversions import MAX_MESSAGES
from jengine.serving.http.bodies import checked, without_nulls
from jengine.serving.http.messages.types import BLOCKS, MESSAGE, PLACES
from jengine.serving.http.turns import Turns, image, text, type_of

INPUT = frozenset(("input",))  # of a tool, in which null has a meaning


def conversation(messages: list[Any], system: Any) -> list[dict[str, Any]]:
    """The messages, and the system prompt first. Neighbouring messages of one role are joined.

    Raises:
        InvalidArgument: a message or block is invalid, or not supported; naming it.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    turns = Turns(joins=True)
    if system is not None:
        turns.add("system", _parts("system", system, "system"))
    for i, given in enumerate(messages):
        where = f"messages[{i}]"
        present = {name: one for name, one in given.items() if one is not None}
        message = checked(MESSAGE, present, where)
        for block in _blocks(f"{where}.content", message["content"], message["role"]):
            _add(turns, message["role"], block)
    if not any(message["role"] != "system" for message in turns.messages):
        raise InvalidArgument("messages", None, "must have a message with content")
    if "tool_calls" in turns.messages[-1]:
        raise InvalidArgument("messages", None, "must have a tool_result after tool_use")
    return turns.messages


def _add(turns: Turns, role: Any, block: dict[str, Any]) -> None:
    match block["type"]:
        case "text" | "image":
            turns.add(role, [block["part"]])
        case "thinking":
            turns.reasoning(block["thinking"])
        case "tool_use":
            turns.call(block["id"], block["name"], block["input"])
        case "tool_result":
            turns.result(block["tool_use_id"], block["content"])


def _blocks(where: str, content: str | list[Any], place: str) -> list[dict[str, Any]]:
    """Validated blocks, with the parts of the conversation that texts and images become. The content of a
    result is a list of parts.
    """
    if isinstance(content, str):
        return [{"type": "text", "part": text(content)}]
    out = []
    for i, given in enumerate(content):
        at = f"{where}[{i}]"
        kind = type_of(given)
        if kind is None or kind not in PLACES[place]:
            limit = f"this server supports {', '.join(PLACES[place])} here"
            raise InvalidArgument(f"{at}.type", kind, limit)
        block = checked(BLOCKS[kind], without_nulls(given, at, INPUT), at)
        if kind == "tool_result":
            failed = [text("Error:")] if block.get("is_error") else []
            parts = _parts(f"{at}.content", block.get("content", ""), "result")
            block = {**block, "content": [*failed, *parts]}
        elif kind in ("text", "image"):
            block = {"type": kind, "part": _part(block, at)}
        out.append(block)
    return out


def _parts(where: str, content: str | list[Any], place: str) -> list[dict[str, Any]]:
    return [block["part"] for block in _blocks(where, content, place)]


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    if block["type"] == "text":
        return text(block["text"])
    source = block["source"]
    if "url" in source:
        return image(source["url"], f"{where}.source.url")
    return image(f"data:{source['media_type']};base64,{source['data']}", f"{where}.source")
