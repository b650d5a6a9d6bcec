"""Tools for chat templates that have none: definitions and results become plain text. A grammar forces the
calls' form.
"""

from __future__ import annotations

import json
from typing import Any

from jengine import Tokenizer
from jengine.serving.http.tool_choice import ToolChoice

Message = dict[str, Any]


def shows_tools(tokenizer: Tokenizer, template: str | None) -> bool:
    """Whether the chat template shows tools.

    Args:
        template: the client's own; None: the model's. A client's is only searched for the word: it is parsed
            later, in a sandbox.
    """
    if template is not None:
        return "tools" in template
    own = tokenizer.chat_templates
    used = own.get("tool_use") or own.get("default")
    return used is None or "tools" in used.names  # without a template, the request fails later


def with_tools_as_text(messages: Any, tools: ToolChoice) -> Any:
    """The conversation with forced tools in its system message, or in a new one. What is no message stays: it
    is rejected later.
    """
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        return messages
    plain = [_as_text(message) for message in messages]
    if tools.forced is None:
        return plain
    if plain[0].get("role") in ("system", "developer"):
        return [
            {**plain[0], "content": [*_parts(plain[0].get("content")), *_parts(_instructions(tools))]},
            *plain[1:],
        ]
    return [{"role": "system", "content": _instructions(tools)}, *plain]


def _instructions(tools: ToolChoice) -> str:
    functions = [
        tool["function"] for tool in tools.shown if tools.forced in ("required", tool["function"]["name"])
    ]
    listed = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    if tools.forced == "required":
        form = 'a JSON array of calls and nothing else: [{"name": "...", "parameters": {...}}]'
        return f"You can call these functions:\n{listed}\n\nAnswer with {form}"
    return f"Call this function:\n{listed}\n\nAnswer with its parameters as a JSON object and nothing else."


def _as_text(message: Message) -> Message:
    """A result as a user's message: the model knows no messages of tools."""
    if message.get("role") != "tool":
        return message
    return {"role": "user", "content": [*_parts("Result of the call:"), *_parts(message.get("content"))]}


def _parts(content: Any) -> list[Any]:
    """A message's content as a list of parts."""
    return (
        content
        if isinstance(content, list)
        else []
        if content is None
        else [{"type": "text", "text": content}]
    )
