"""The input of a response as messages of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.grpc.conversions import MAX_MESSAGES
from jengine.serving.http.bodies import checked, without_nulls
from jengine.serving.http.responses.types import ITEMS, PARTS
from jengine.serving.http.turns import Turns, image, text, type_of


def conversation(given: str | list[Any] | None, instructions: str | None) -> list[dict[str, Any]]:
    """The messages, and the instructions first, as a system message.

    Raises:
        InvalidArgument: an item is invalid, or not supported; naming it.
    """
    if not given:
        raise InvalidArgument("input", given, "must be given")
    if len(given) > MAX_MESSAGES and not isinstance(given, str):
        raise InvalidArgument("input", f"{len(given)} items", f"at most {MAX_MESSAGES}")
    turns = Turns(joins=False)
    if instructions is not None:
        turns.add("system", [text(instructions)])
    if isinstance(given, str):
        turns.add("user", [text(given)])
        return turns.messages
    for i, item in enumerate(given):
        _add(turns, f"input[{i}]", item)
    return turns.messages


def _add(turns: Turns, where: str, given: Any) -> None:
    kind = type_of(given, "message")
    if kind is None or kind not in ITEMS:
        raise InvalidArgument(f"{where}.type", kind, f"this server supports {', '.join(ITEMS)}")
    item = checked(ITEMS[kind], without_nulls(given, where), where)
    match kind:
        case "message":
            turns.add(item["role"], _parts(f"{where}.content", item["content"]))
        case "function_call":
            turns.call(item["call_id"], item["name"], item["arguments"])
        case "function_call_output":
            turns.result(item["call_id"], _parts(f"{where}.output", item["output"]))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turns.reasoning("\n".join(part["text"] for part in parts))


def _parts(where: str, content: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text(content)]
    out = []
    for i, part in enumerate(content):
        kind = type_of(part)
        if kind is None or kind not in PARTS:
            raise InvalidArgument(f"{where}[{i}].type", kind, f"this server supports {', '.join(PARTS)}")
        whole = checked(PARTS[kind], part, f"{where}[{i}]")
        out.append(
            image(whole["image_url"], f"{where}[{i}].image_url")
            if kind == "input_image"
            else text(whole["text"])
        )
    return out
