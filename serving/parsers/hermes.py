"""The format of Hermes and Qwen: text with any number of `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`.
"""

from __future__ import annotations

from jengine.serving.parsers.events import Event, Held, Stepwise, joined, split
from jengine.serving.parsers.json_calls import JsonCall

START, END = "<tool_call>", "</tool_call>"


class Hermes(Stepwise):
    """Text between the markers that is not a valid call is content, including the markers."""

    def __init__(self) -> None:
        super().__init__()
        self._content, self._count = Held(), 0
        self._call: JsonCall | None = None
        self._space = ""  # before a call's first character
        self._closing = False

    def _step(self, events: list[Event]) -> bool:
        if self._closing:
            _, found, self._buffer = split(self._buffer, END)
            self._closing = not found
            return found
        if self._call is None:
            text, found, self._buffer = split(self._buffer, START)
            events += self._content.text(text) if text else []
            if found:
                self._call, self._space = JsonCall(self._count), ""
            return found
        return self._read(self._call, events)

    def _read(self, call: JsonCall, events: list[Event]) -> bool:
        if not call.raw and not call.begun:
            body = self._buffer.lstrip()
            self._space += self._buffer[: len(self._buffer) - len(body)]
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
            self._call, self._closing = None, True
        return bool(self._buffer)

    def _no_call(self, events: list[Event]) -> bool:
        assert self._call is not None
        events += self._content.text(START + self._space + self._call.raw)
        self._call = None
        return True

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._call is not None and not self._call.begun:
            self._no_call(events)
        if self._buffer and not self._closing:
            events += self._content.text(self._buffer)
        return joined([*events, *self._content.finish()])
