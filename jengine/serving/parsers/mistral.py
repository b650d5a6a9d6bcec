"""Mistral's formats: `[TOOL_CALLS]`, then a JSON array of calls or, in newer models, `name{...}` or
`name[ARGS]{...}` for each call."""

from __future__ import annotations

from collections.abc import Container

from jengine.serving.parsers.events import (
    Arguments,
    ContentTrimmer,
    Event,
    Stepwise,
    ToolCallStart,
    joined,
    split,
)
from jengine.serving.parsers.json_calls import BEFORE, LAST, CallList, JsonValue

START, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(Stepwise):
    """Text after the marker that is not a valid call is content, including the marker. Without the marker, an
    array of calls of known tools at the beginning of an answer counts, too.

    Args:
        names: names of the tools; None: they are not known.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._content, self._count = ContentTrimmer(), 0
        self._begins = names is not None  # an array without the marker may follow
        self._called = False  # a marker was read, but not the text after it
        self._opening = ""  # what was read of a list without a call
        self._list: CallList | None = None
        self._arguments: JsonValue | None = None  # of a named call

    def _step(self, events: list[Event]) -> bool:
        if self._list is not None:
            return self._in_list(self._list, events)
        if self._arguments is not None:
            return self._in_arguments(self._arguments, events)
        if self._called:
            return self._after_marker(events)
        if self._begins:
            body = self._buffer.lstrip()
            if not body or START.startswith(body):
                return False
            self._begins = False
            if body[0] == "[" and not body.startswith(START):
                self._list = CallList(names=self._names, bare=True)
                return True
        text, self._called, self._buffer = split(self._buffer, START)
        events += self._content.text(text)
        self._opening = START
        return self._called

    def _after_marker(self, events: list[Event]) -> bool:
        body = self._buffer.lstrip()
        if not body:
            return False
        if body[0] == "[":
            self._list = CallList(self._count)
            return True
        head, brace, _ = split(body, "{")
        if not brace:
            return False
        self._called = False
        name = head.partition(ARGS)[0].partition(ID)[0].strip()
        known = self._names is not None and name in self._names
        if not known and (not name or any(character.isspace() for character in name)):
            events += self._content.text(START)
            return True
        self._content.call()
        events.append(ToolCallStart(self._count, name))
        self._arguments, self._buffer = JsonValue(), body[body.index("{") :]
        return True

    def _in_list(self, calls: CallList, events: list[Event]) -> bool:
        before = calls.count
        read, news = calls.feed(self._buffer)
        self._opening += self._buffer[:read] if not calls.count else ""
        self._buffer = self._buffer[read:]
        events += news
        if calls.count > before:
            self._content.call()
        if calls.done:
            self._list, self._called, self._count = None, False, self._count + calls.count
            events += self._content.text(calls.raw if calls.count else self._opening)
        return bool(self._buffer)

    def _in_arguments(self, value: JsonValue, events: list[Event]) -> bool:
        for at, character in enumerate(self._buffer):
            status = value.feed(character)
            if status in (LAST, BEFORE):
                end = at + (status == LAST)
                events.append(Arguments(self._count, self._buffer[:end]))
                self._buffer, self._arguments, self._count = self._buffer[end:], None, self._count + 1
                return True
        events.append(Arguments(self._count, self._buffer))
        self._buffer = ""
        return False

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._list is not None:
            raw = self._list.finish()
            events += self._content.text(raw if self._list.count else self._opening)
        elif self._arguments is None and (self._called or self._buffer):
            events += self._content.text((START if self._called else "") + self._buffer)
        return joined([*events, *self._content.finish()])
