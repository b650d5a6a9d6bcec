"""Parsers for calls forced by a grammar: the answer is JSON, independent of the model's own format."""

from __future__ import annotations

from jengine.serving.parsers.events import Arguments, Event, ToolCallStart, joined
from jengine.serving.parsers.json_calls import CallList


class NamedCall:
    """The whole text is one tool's arguments."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        start: list[Event] = [] if self._begun else [ToolCallStart(0, self._name)]
        self._begun = True
        return [*start, Arguments(0, text)]

    def finish(self) -> list[Event]:
        return []


class CallArray:
    """The text is a JSON array of calls."""

    def __init__(self) -> None:
        self._calls = CallList()

    def push(self, text: str) -> list[Event]:
        return joined(self._calls.feed(text)[1])

    def finish(self) -> list[Event]:
        return []
