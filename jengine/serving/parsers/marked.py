"""Calls between markers: DeepSeek V3's and R1's format, V3.1's, and Kimi K2's."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass

from jengine.serving.parsers.events import (
    Arguments,
    ContentTrimmer,
    Event,
    Stepwise,
    ToolCallStart,
    joined,
    split,
    split_at,
)
from jengine.serving.parsers.json_calls import BEFORE, LAST, JsonValue


@dataclass(frozen=True, slots=True)
class Marks:
    """A format's.

    Attributes:
        begin, end: around all calls.
        call, call_end: around each.
        separator: between a call's name and its arguments.
        name: the tool's, from what comes before its arguments' brace, and the known names; empty where that
            is no call.
    """

    begin: str
    end: str
    call: str
    call_end: str
    separator: str
    name: Callable[[str, Container[str]], str]


def _deepseek(name: str) -> str:
    """A token of DeepSeek's, whose bars are fullwidth."""
    return f"<\uff5c{name}\uff5c>"


def _deepseek_name(head: str, names: Container[str]) -> str:
    """The name in `NAME<sep>`, or in `function<sep>NAME` and the beginning of a code block."""
    kind, _, rest = head.partition(_deepseek("tool▁sep"))
    name = rest.strip().removesuffix("```json").strip() or kind.strip()
    return name if name in names or not re.search(r"\s", name) else ""


def _kimi_name(head: str, names: Container[str]) -> str:
    """The name in `functions.NAME:INDEX<|tool_call_argument_begin|>`."""
    name = head.partition("<|tool_call_argument_begin|>")[0].strip()
    for known in (name, name.removeprefix("functions.")):
        if known in names:
            return known
    name = re.sub(r":\d+$", "", name.removeprefix("functions."))
    return name if name in names or not re.search(r"\s", name) else ""


_BEGIN, _END, _CALL, _CALL_END = (
    _deepseek(f"tool▁call{part}") for part in ("s▁begin", "s▁end", "▁begin", "▁end")
)
DEEPSEEK = Marks(_BEGIN, _END, _CALL, _CALL_END, _deepseek("tool▁sep"), _deepseek_name)
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    _kimi_name,
)


class MarkedCalls(Stepwise):
    """A call without a name or a brace is content, its markers included. The markers around all calls, and
    the one at a call's end, may be missing.

    Args:
        names: names of the tools.
    """

    def __init__(self, marks: Marks, names: Container[str] = ()) -> None:
        super().__init__()
        self._marks, self._names, self._content, self._count = marks, names, ContentTrimmer(), 0
        self._state: Callable[[list[Event]], bool] = self._outside
        self._arguments = JsonValue()

    def _step(self, events: list[Event]) -> bool:
        return self._state(events)

    def _outside(self, events: list[Event]) -> bool:
        text, mark, self._buffer = split_at(self._buffer, self._marks.begin, self._marks.call)
        events += self._content.text(text) if text else []
        self._state = {self._marks.begin: self._between, self._marks.call: self._head}.get(
            mark, self._outside
        )
        return bool(mark)

    def _between(self, events: list[Event]) -> bool:
        """Before a call, or after the last one."""
        body = self._buffer.lstrip()
        for mark, state in ((self._marks.call, self._head), (self._marks.end, self._outside)):
            if body.startswith(mark):
                self._buffer, self._state = body[len(mark) :], state
                return True
            if mark.startswith(body):
                return False
        self._state = self._outside
        return True

    def _head(self, events: list[Event]) -> bool:
        head, brace, _ = split(self._buffer, "{")
        before, ended, rest = head.partition(self._marks.call_end)
        if ended and self._marks.separator in before:  # no arguments
            brace, self._buffer = True, rest
        elif ended:
            return self._no_call(events)
        if not brace:
            return False
        name = self._marks.name(before, self._names)
        if not name:
            return self._no_call(events)
        self._content.call()
        events.append(ToolCallStart(self._count, name))
        if ended:
            events.append(Arguments(self._count, "{}"))
            self._count, self._state = self._count + 1, self._between
            return True
        self._buffer, self._state = self._buffer[len(head) :], self._in_arguments
        self._arguments = JsonValue()
        return True

    def _no_call(self, events: list[Event]) -> bool:
        events += self._content.text(self._marks.call)
        self._state = self._outside
        return True

    def _in_arguments(self, events: list[Event]) -> bool:
        for at, character in enumerate(self._buffer):
            status = self._arguments.feed(character)
            if status in (LAST, BEFORE):
                end = at + (status == LAST)
                events.append(Arguments(self._count, self._buffer[:end]))
                self._buffer, self._count, self._state = self._buffer[end:], self._count + 1, self._after
                return True
        events.append(Arguments(self._count, self._buffer))
        self._buffer = ""
        return False

    def _after(self, events: list[Event]) -> bool:
        """What may follow arguments, such as the end of a code block, belongs to the call."""
        marks = self._marks
        text, mark, rest = split_at(self._buffer, marks.call_end, marks.call, marks.end)
        if not mark:
            return False
        self._leave(text, events)
        self._buffer = rest if mark == marks.call_end else mark + rest
        self._state = self._between
        return True

    def _leave(self, text: str, events: list[Event]) -> None:
        """Text after a call is content, unless it is the end of a code block."""
        if any(character.isalnum() for character in text):
            events += self._content.text(text)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == self._head:
            events += self._content.text(self._marks.call + self._buffer)
        elif self._state == self._after:
            self._leave(self._buffer, events)
        elif self._state == self._outside and self._buffer:
            events += self._content.text(self._buffer)
        return joined([*events, *self._content.finish()])
