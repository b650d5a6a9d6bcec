"""Tools for chat templates that have none: their definitions become a part of the system message."""

from __future__ import annotations

import json
from typing import Any

from jengine.base.errors import InvalidArgument
from jengine.text.template_adapter import INSTRUCTIONS, joined
from jengine.text.template_traits import Conversation

CALLS = 'a JSON array of calls and nothing else: [{"name": "...", "parameters": {...}}]'


def with_tools_as_text(
    messages: Conversation, tools: list[dict[str, Any]], tool_choice: str | None = None
) -> Conversation:
    """The conversation with the tools in its first system message, or in a new one.

    Args:
        tool_choice: "required", or the name of a tool, if a grammar forces a call: of any tool, or the
            parameters of this one. None: the model chooses.

    Raises:
        InvalidArgument: a tool is no function.
    """
    text = _instructions([_function(i, tool) for i, tool in enumerate(tools)], tool_choice)
    if messages[0]["role"] in INSTRUCTIONS:
        return [{**messages[0], "content": joined(messages[0]["content"], text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _function(place: int, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        return function
    limit = 'must be an object such as {"type": "function", "function": {"name": "f"}}'
    raise InvalidArgument(f"tools[{place}]", tool, limit)


def _instructions(functions: list[dict[str, Any]], tool_choice: str | None) -> str:
    if tool_choice not in (None, "required"):
        [function] = [function for function in functions if function["name"] == tool_choice]
        listed = json.dumps(function, ensure_ascii=False)
        form = "Answer with its parameters as a JSON object and nothing else."
        return f"Call this function:\n{listed}\n\n{form}"
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    if tool_choice == "required":
        form = f"Answer with {CALLS}"
    else:
        form = f"To call functions, answer with {CALLS}\nOtherwise answer with text."
    return f"You can call these functions:\n{listed}\n\n{form}"
