"""The input of a response as messages of /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

from jengine import InvalidArgument
from jengine.serving.grpc.conversions import MAX_MESSAGES
from jengine.serving.http.bodies import checked, without_nulls
from jengine.serving.http.responses.tools import INPUT, flat_name
from jengine.serving.http.responses.types import ITEMS, PARTS
from jengine.serving.http.turns import Turns, image, text, type_of

COMPACTED = "[Earlier turns of this conversation are missing: another server has compacted them.]"
RESULTS = ("output", "outputs", "results", "result", "error")  # members of calls that another server ran


def conversation(items: str | list[Any] | None, instructions: str | None) -> list[dict[str, Any]]:
    """The messages, and the instructions first, as a system message.

    Raises:
        InvalidArgument: an item is invalid, or not supported; naming it.
    """
    if not items:
        raise InvalidArgument("input", items, "must be given")
    if len(items) > MAX_MESSAGES and not isinstance(items, str):
        raise InvalidArgument("input", f"{len(items)} items", f"at most {MAX_MESSAGES}")
    turns = Turns(joins=False)
    if instructions is not None:
        turns.add("system", [text(instructions)])
    if isinstance(items, str):
        turns.add("user", [text(items)])
        return turns.messages
    for i, item in enumerate(items):
        _add(turns, f"input[{i}]", item)
    return turns.messages


def _add(turns: Turns, where: str, item: Any) -> None:
    kind = type_of(item, "message")
    if kind is None or kind not in ITEMS:
        raise InvalidArgument(f"{where}.type", kind, f"this server supports {', '.join(ITEMS)}")
    item = checked(ITEMS[kind], without_nulls(item, where), where)
    match kind:
        case "message":
            turns.add(item["role"], _parts(f"{where}.content", item["content"]))
        case "function_call":
            turns.call(item["call_id"], flat_name(item["name"], item.get("namespace")), item["arguments"])
        case "custom_tool_call":
            name = flat_name(item["name"], item.get("namespace"))
            turns.call(item["call_id"], name, {INPUT: item["input"]})
        case "function_call_output" | "custom_tool_call_output":
            turns.result(item["call_id"], _parts(f"{where}.output", item["output"]))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if parts:
                turns.reasoning("\n".join(part["text"] for part in parts))
        case "compaction":
            turns.add("user", [text(COMPACTED)])
        case "item_reference":
            limit = "names no item that this server keeps: send the item itself, with store=false"
            raise InvalidArgument(f"{where}.id", item["id"], limit)
        case _:
            _add_other(turns, kind, item)


def _add_other(turns: Turns, kind: str, item: dict[str, Any]) -> None:
    """A call of another server's tool, or its output. A call that the server ran has its result within."""
    call_id = item.get("call_id") or item.get("id") or kind
    if kind.endswith("_output"):
        output = item.get("output", "")
        turns.result(call_id, [text(output if isinstance(output, str) else _json(output))])
        return
    hidden = ("type", "id", "call_id", "status", *RESULTS)
    name = kind.removesuffix("_call")
    turns.call(call_id, name, {member: value for member, value in item.items() if member not in hidden})
    if f"{kind}_output" not in ITEMS:
        results = {member: item[member] for member in RESULTS if member in item}
        turns.result(call_id, [text(_json(results) if results else item.get("status", "completed"))])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parts(where: str, content: str | list[Any]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text(content)]
    out = []
    for i, part in enumerate(content):
        kind = type_of(part)
        if kind is None or kind not in PARTS:
            raise InvalidArgument(f"{where}[{i}].type", kind, f"this server supports {', '.join(PARTS)}")
        whole = checked(PARTS[kind], part, f"{where}[{i}]")
        if kind == "input_image":
            out.append(image(whole["image_url"], f"{where}[{i}].image_url"))
        else:
            out.append(text(whole["refusal" if kind == "refusal" else "text"]))
    return out
