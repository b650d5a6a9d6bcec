"""Builds a conversation for chat templates from parts, of which other APIs' conversations consist."""

from __future__ import annotations

import json
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant"]
Message = dict[str, Any]


class Turns:
    """A template expects the reasoning, the text and the calls of an answer in one message.

    Args:
        joins: whether neighbouring texts of one role become one message.

    Attributes:
        messages: as for /v1/chat/completions.
    """

    def __init__(self, joins: bool) -> None:
        self.messages: list[Message] = []
        self._joins = joins

    def text(self, role: Role, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        open = last.get("role") == role and "tool_calls" not in last
        if open and (self._joins or not last["content"]):
            last["content"].append({"type": "text", "text": text})
        else:
            self.messages.append({"role": role, "content": [{"type": "text", "text": text}]})

    def reasoning(self, text: str) -> None:
        self._answer(True)["reasoning_content"] = text

    def call(self, id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Arguments may be JSON text."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
        self._answer(False).setdefault("tool_calls", []).append(call)

    def result(self, id: str, texts: list[str]) -> None:
        """The result of the call with this id."""
        content = [{"type": "text", "text": text} for text in texts]
        self.messages.append({"role": "tool", "tool_call_id": id, "content": content})

    def _answer(self, new: bool) -> Message:
        """The message of the answer, or a new one."""
        if new or not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]
