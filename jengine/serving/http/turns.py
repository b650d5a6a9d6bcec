"""Builds a conversation for chat templates from parts, of which other APIs' conversations consist."""

from __future__ import annotations

import json
from typing import Any, Literal

from jengine.serving.calls.call import NamedImage

Role = Literal["system", "developer", "user", "assistant"]
Message = dict[str, Any]


def type_of(part: object, default: str | None = None) -> str | None:
    """The type of a part of a client's body; None if it has none that is text."""
    kind = part.get("type", default) if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


class Turns:
    """Builds messages. Templates expect the reasoning, the text and the calls of an answer in one message.

    Args:
        joins: whether neighbouring parts of one role become one message.

    Attributes:
        messages: as for /v1/chat/completions.
    """

    def __init__(self, joins: bool) -> None:
        self.messages: list[Message] = []
        self._joins = joins

    def add(self, role: Role, parts: list[Message]) -> None:
        """Texts and images, see `text` and `image`."""
        last = self.messages[-1] if self.messages else {}
        goes_on = last.get("role") == role and "tool_calls" not in last
        if not goes_on or (last["content"] and not self._joins):
            last = {"role": role, "content": []}
            self.messages.append(last)
        last["content"] += parts

    def reasoning(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": [], "reasoning_content": text})

    def call(self, id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Arguments may be JSON text."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def result(self, id: str, parts: list[Message]) -> None:
        """The result of the call with this id."""
        self.messages.append({"role": "tool", "tool_call_id": id, "content": parts})


def text(text: str) -> Message:
    """A part of a message."""
    return {"type": "text", "text": text}


def image(url: str, field: str) -> Message:
    """A part of a message. The address is checked where it is read; errors name the field."""
    return {"type": "image", "image": NamedImage(url, field)}
