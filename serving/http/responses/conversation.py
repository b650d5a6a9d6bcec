"""The input of a response as messages of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from jengine import InvalidArgument
from jengine.serving.grpc.conversions import MAX_MESSAGES
from jengine.serving.http.bodies import checked
from jengine.serving.http.responses.types import ITEMS, TEXTS
from jengine.serving.http.turns import Turns


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
        turns.text("system", [instructions])
    if isinstance(given, str):
        turns.text("user", [given])
        return turns.messages
    for i, item in enumerate(given):
        _add(turns, f"input[{i}]", item)
    return turns.messages


def _add(turns: Turns, where: str, given: Any) -> None:
    kind = given.get("type", "message") if isinstance(given, dict) else None
    if kind not in ITEMS:
        raise InvalidArgument(f"{where}.type", kind, f"this server supports {', '.join(ITEMS)}")
    item = checked(ITEMS[kind], {name: value for name, value in given.items() if value is not None}, where)
    match kind:
        case "message":
            turns.text(item["role"], _texts(f"{where}.content", item["content"]))
        case "function_call":
            turns.call(item["call_id"], item["name"], item["arguments"])
        case "function_call_output":
            turns.result(item["call_id"], _texts(f"{where}.output", item["output"]))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turns.reasoning("\n".join(part["text"] for part in parts))


def _texts(where: str, content: str | list[Any]) -> list[str]:
    if isinstance(content, str):
        return [content]
    out = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXTS:
            raise InvalidArgument(f"{where}[{i}].type", kind, f"this server supports {', '.join(TEXTS)}")
        present = {name: value for name, value in part.items() if value is not None}
        out.append(checked(TEXTS[kind], present, f"{where}[{i}]")["text"])
    return out
