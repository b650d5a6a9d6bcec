"""The format of Hermes and Qwen: text with any number of `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.
"""

from __future__ import annotations

from collections.abc import Container

from jengine.serving.parsers.events import ContentTrimmer, Event, Stepwise, joined, split
from jengine.serving.parsers.json_calls import JsonCall

START, END = "<tool_call>", "</tool_call>"


class Hermes(Stepwise):
    """Text between the markers that is not a valid call is content, including the markers. A marker may be
    missing: the next call ends the one before, and an object with a known name and arguments is a call where
    the answer, or another call, could begin.

    Args:
        names: names of the tools; None: they are not known.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        super().__init__()
        self._names = names
        self._content, self._count = ContentTrimmer(), 0
        self._call: JsonCall | None = None
        self._opening = ""  # what was read before a call's first character
        self._begins = True  # a call without its opening marker may follow
        self._closing = False

    def _step(self, events: list[Event]) -> bool:
        if self._closing:
            return self._close(events)
        if self._call is not None:
            return self._read(self._call, events)
        if self._begins and self._names is not None:
            body = self._buffer.lstrip()
            if not body:
                return False
            if body[0] == "{":
                self._opening = self._buffer[: len(self._buffer) - len(body)]
                self._call, self._buffer = JsonCall(self._count, self._names, bare=True), body
                return True
        text, marker, self._buffer = split(self._buffer, START)
        self._show(text, events)
        if marker:
            self._call, self._opening = JsonCall(self._count), START
        return marker

    def _read(self, call: JsonCall, events: list[Event]) -> bool:
        if not call.raw and not call.begun:
            body = self._buffer.lstrip()
            self._opening += self._buffer[: len(self._buffer) - len(body)]
            self._buffer = body
            if body and body[0] != "{":
                return self._no_call(events)
        was = call.begun
        read, news = call.feed(self._buffer)
        self._buffer = self._buffer[read:]
        if call.begun and not was:
            self._content.call()
            self._count += 1
        events += news
        if call.failed:
            return self._no_call(events)
        if call.done:
            self._call, self._closing, self._begins = None, True, True
        return bool(self._buffer)

    def _close(self, events: list[Event]) -> bool:
        """After a call: reads its closing marker, if there is one."""
        body = self._buffer.lstrip()
        if body.startswith("{") and not self._opening.strip():  # neither call has markers
            self._buffer, self._closing = body, False
            return True
        text, marker, rest = split(self._buffer, END)
        before, opens, _ = split(text, START)
        if not opens and not marker:
            return False
        if opens:  # the marker is missing
            self._leave(before, events)
            self._buffer = self._buffer[len(before) :]
        else:
            self._leave(text, events)
            self._buffer = rest
        self._closing = False
        return True

    def _leave(self, text: str, events: list[Event]) -> None:
        """What follows a call's end is content, unless it consists of brackets that are too many."""
        if any(character.isalnum() for character in text):
            self._show(text, events)

    def _no_call(self, events: list[Event]) -> bool:
        assert self._call is not None
        raw, self._call = self._call.raw, None
        self._show(self._opening + raw, events)
        return True

    def _show(self, text: str, events: list[Event]) -> None:
        if text:
            self._begins = self._begins and not text.strip()
            events += self._content.text(text)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._closing:
            self._leave(self._buffer, events)
            self._buffer = ""
        elif self._call is not None and not self._call.begun:
            self._no_call(events)
        if self._buffer:
            self._show(self._buffer, events)
        return joined([*events, *self._content.finish()])
