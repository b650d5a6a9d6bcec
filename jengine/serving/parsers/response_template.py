"""Parses answers with the tokenizer's `response_template` (transformers 5)."""

from __future__ import annotations

import json
from typing import Any

from jengine.serving.parsers.events import Arguments, Content, Event, Reasoning, ToolCallStart, clean, joined

THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class ResponseTemplate:
    """Wraps the parser of transformers.

    Args:
        template: from tokenizer_config.json.
        prompt: the conversation, which may contain the answer's beginning.
        tools: as in the request; arguments are converted to the types that they declare.
    """

    def __init__(self, template: dict[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # takes a second to import

        self._parser = ResponseParser(template, prefix=prompt, tools=[*tools])
        self._count, self._open = 0, ""  # for the open region, text that was not emitted
        self._failed = False

    def push(self, text: str) -> list[Event]:
        if self._failed:
            return [Content(text)] if text else []
        return self._guarded(lambda: self._parser.feed(text), text)

    def finish(self) -> list[Event]:
        return [] if self._failed else self._guarded(lambda: self._parser.finalize()[1], "")

    def _guarded(self, work: Any, text: str) -> list[Event]:
        """Treats text that the template cannot parse as content."""
        try:
            return joined([event for region in work() for event in self._events(region)])
        except (ValueError, TypeError, KeyError, RecursionError):
            self._failed = True
            rest = self._open + text
            return [Content(rest)] if rest else []

    def _events(self, region: dict[str, Any]) -> list[Event]:
        field, kind = region["field"], region["type"]
        if field in ("content", *THOUGHTS):
            if kind != "region_chunk" or not region["text"]:
                return []
            return [Content(region["text"]) if field == "content" else Reasoning(region["text"])]
        if field != "tool_calls":
            return []
        if kind == "region_chunk":
            self._open += region["text"]
        if kind != "region_close":
            return []
        self._open = ""
        events = call_events(region["value"], self._count)
        self._count += len(events) // 2
        return events


def call_events(value: Any, first: int) -> list[Event]:
    """Two events for each call. Raises KeyError or TypeError if it is not a call."""
    events: list[Event] = []
    for index, call in enumerate(value if isinstance(value, list) else [value], first):
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        events += [ToolCallStart(index, clean(function["name"])), Arguments(index, clean(text))]
    return events
