"""gpt-oss's format, harmony: messages in channels, such as `<|channel|>final<|message|>text<|return|>`.

The channel `analysis` is reasoning. A message to a function, `to=functions.f`, is a call, with the arguments
as its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container

from jengine.serving.parsers.events import (
    Arguments,
    Content,
    Event,
    Reasoning,
    Stepwise,
    ToolCallStart,
    split,
)
from jengine.serving.parsers.json_calls import JsonValue

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)  # that end a message's text
OPENINGS = (CHANNEL, START, "to=")  # possible beginnings of an answer, after whitespace
TO, NAMED = re.compile(r"\bto=([^\s<]+)"), re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class Harmony(Stepwise):
    """An answer that does not begin with a channel is content; this occurs if a grammar forces its text.

    Args:
        names: functions that may be called; messages to other recipients are reasoning.
        raw: those of them whose input is text, not JSON.
    """

    def __init__(self, names: Collection[str], raw: Container[str] = ()) -> None:
        super().__init__()
        self._names, self._raw = names, raw
        self._part, self._kind = "opening", "content"
        self._calls, self._arguments = 0, JsonValue()
        self._empty = True  # nothing of the message's text has been emitted

    def _step(self, events: list[Event]) -> bool:
        if self._part == "opening":
            body = self._buffer.lstrip()
            if any(opening.startswith(body) for opening in OPENINGS if len(body) < len(opening)):
                return False
            self._part = "header" if body.startswith(OPENINGS) else "text"
            return True
        if self._part == "header":
            header, marker, rest = self._buffer.partition(MESSAGE)
            if marker:
                self._buffer, self._part = rest, "text"
                self._begin(header, events)
            return bool(marker)
        text, end, self._buffer = split(self._buffer, *ENDS)
        self._emit(text, events)
        if end:
            self._finish_message(events)
            self._part = "header"
        return bool(end)

    def _begin(self, header: str, events: list[Event]) -> None:
        recipient, channel = TO.search(header), NAMED.search(header)
        name = self._name(header[recipient.start(1) :]) if recipient else ""
        self._empty = True
        if name in self._names:
            self._kind, self._arguments = "input" if name in self._raw else "call", JsonValue()
            events.append(ToolCallStart(self._calls, name))
        else:
            self._kind = "reasoning" if name or (channel and channel[1] == "analysis") else "content"

    def _name(self, text: str) -> str:
        """The function at the beginning of a header's rest. Known names may have spaces."""
        text = text.removeprefix("functions.")
        plain = re.split(r"[\s<]", text, maxsplit=1)[0]
        spaced = [name for name in self._names if re.match(re.escape(name) + r"(?![^\s<])", text)]
        return max([plain, *spaced], key=len)

    def _emit(self, text: str, events: list[Event]) -> None:
        if text:
            self._empty = False
            if self._kind == "call":
                text = self._arguments.all_escaped(text)
            kinds: dict[str, Event] = {
                "content": Content(text),
                "reasoning": Reasoning(text),
            }
            events.append(kinds.get(self._kind) or Arguments(self._calls, text))

    def _finish_message(self, events: list[Event]) -> None:
        if self._kind == "call" and self._empty:
            events.append(Arguments(self._calls, "{}"))
        self._calls += self._kind in ("call", "input")
        self._kind = "content"

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._part != "header":  # headers are not shown
            self._emit(self._buffer, events)
            self._finish_message(events)
        self._buffer = ""
        return events
