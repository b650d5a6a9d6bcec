"""Formats of calls that are JSON with or without markers: of Hermes and Qwen (text with any number of
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`), Llama 3 and Mistral.
"""

from __future__ import annotations

import re
from collections.abc import Container

from jengine.serving.parsers.events import (
    Arguments,
    ContentTrimmer,
    Event,
    OutputParser,
    PlainText,
    Stepwise,
    ToolCallStart,
    joined,
    split,
)
from jengine.serving.parsers.json_calls import CallList, JsonCall, JsonValue

START, END = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"  # optional, at the beginning
FENCE = re.compile(r"```\w{0,20}\s*")  # models often write calls in a code block
FENCE_BEGINS = re.compile(r"`{1,3}|```\w{0,20}\s*")
CALLS_START, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


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
        return bool(marker)

    def _read(self, call: JsonCall, events: list[Event]) -> bool:
        if call.empty:
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


class LlamaJson:
    """An answer that begins differently, or with a call of an unknown tool, is no call.

    Args:
        names: names of the tools.
        rest: reads an answer that is no call.
    """

    def __init__(self, names: Container[str], rest: OutputParser | None = None) -> None:
        self._names, self._rest = names, rest or PlainText()
        self._calls = CallList(names=names, between=";,", array=False)
        self._content = ContentTrimmer()
        self._read = ""  # text read before a call began
        self._opened = self._over = self._fenced = False

    def push(self, text: str) -> list[Event]:
        if self._over:
            return self._after(text)
        if not self._calls.count:
            self._read += text
        if not self._opened:
            body = self._read.lstrip()
            if body.startswith(TAG):
                body = body[len(TAG) :].lstrip()
            if not body or TAG.startswith(body) or FENCE_BEGINS.fullmatch(body):
                return []
            if fence := FENCE.match(body):
                self._fenced, body = True, body[fence.end() :]
            if body[0] not in "{[":
                return self._end("")
            if body[0] == "[":
                self._calls = CallList(names=self._names)
            self._opened, text = True, body
        at, events = self._calls.feed(text)
        if self._calls.count and self._read:
            self._content.call()
            self._read = ""
        if self._calls.done:
            events += self._end(self._calls.raw + text[at:])
        return joined(events)

    def _end(self, text: str) -> list[Event]:
        """The calls have ended, before this text, or there were none."""
        self._over = True
        return self._after(text if self._calls.count else self._read)

    def _after(self, text: str) -> list[Event]:
        if not self._calls.count:
            return self._rest.push(text)
        if self._fenced:
            self._read += text
            body = self._read.lstrip()
            if len(body) < 3 and "```".startswith(body):
                return []
            self._fenced, text = False, body.removeprefix("```")
        return self._content.text(text)

    def finish(self) -> list[Event]:
        events = [] if self._over else self._end(self._calls.finish())
        return joined([*events, *self._content.finish(), *self._rest.finish()])


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
            if not body or CALLS_START.startswith(body):
                return False
            self._begins = False
            if body[0] == "[" and not body.startswith(CALLS_START):
                self._list = CallList(names=self._names, bare=True)
                return True
        text, self._opening, self._buffer = split(self._buffer, CALLS_START)
        events += self._content.text(text)
        self._called = bool(self._opening)
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
            events += self._content.text(CALLS_START)
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
        shown, read, ended = value.read(self._buffer)
        events.append(Arguments(self._count, shown))
        self._buffer = self._buffer[read:]
        if ended:
            self._arguments, self._count = None, self._count + 1
        return ended

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._list is not None:
            raw = self._list.finish()
            events += self._content.text(raw if self._list.count else self._opening)
        elif self._arguments is None and (self._called or self._buffer):
            events += self._content.text((CALLS_START if self._called else "") + self._buffer)
        return joined([*events, *self._content.finish()])
