"""Calls whose parameters are tags: GLM-4.5's format, MiniMax-M2's, and Qwen3-Coder's, which Qwen3.5 and 3.6
also use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jengine.serving.parsers.events import Arguments, Event, Held, Stepwise, ToolCallStart, joined, split
from jengine.serving.parsers.values import STRING, argument, declared_types, quoted

NAME = re.compile(r"\s*[\w.:/-]*\s*")  # of a tool, with whitespace around it


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a format.

    Attributes:
        section, section_end: around all calls; empty if the format has none.
        call, name_end, call_end: before a tool's name, after it, and after its parameters. If name_end is
            empty, the name ends at the next tag.
        key, key_end: around a parameter's name.
        value, value_end: around its value; value is empty if the value follows key_end.
        newlines: whether a value has a newline before and after it.
    """

    section: str
    section_end: str
    call: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    newlines: bool = False


GLM = Tags(
    "", "", "<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
)
MINIMAX = Tags(
    *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">', "</invoke>"),
    *('<parameter name="', '">', "", "</parameter>"),
)
QWEN_CODER = Tags(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    ">",
    "</function>",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    newlines=True,
)


class TaggedCalls(Stepwise):
    """A value becomes JSON as the tool's schema says. Strings are emitted as they come, other values when
    they are complete.

    Text between the tags of a section that is not a call is content, including the tags.

    Args:
        tools: for each tool's name, the JSON schemas of its parameters by name.
    """

    def __init__(self, tags: Tags, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._tags, self._tools, self._content = tags, tools, Held()
        self._state: Callable[[list[Event]], bool] = self._outside
        self._read = ""  # tags that are content unless a call follows
        self._count, self._name, self._key, self._any = 0, "", "", False
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # pieces of a value that is not a string
        # whether text of a string was emitted; a newline that may be its last character
        self._begun, self._newline = False, ""
        ends = (tags.key, tags.call_end, tags.section_end, tags.call)
        self._next = re.compile("|".join(re.escape(tag) for tag in ends if tag))

    def _step(self, events: list[Event]) -> bool:
        return self._state(events)

    def _outside(self, events: list[Event]) -> bool:
        first = self._tags.section or self._tags.call
        text, found, self._buffer = split(self._buffer, first)
        events += self._content.text(text) if text else []
        if found:
            self._read, self._state = first, self._between if self._tags.section else self._head
        return found

    def _between(self, events: list[Event]) -> bool:
        """Before a call, or after the last one."""
        body = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(body)]
        for tag, state in ((self._tags.call, self._head), (self._tags.section_end, self._outside)):
            if body.startswith(tag):
                self._buffer, self._state = body[len(tag) :], state
                if self._read:
                    self._read += space + tag
                    if state == self._outside:
                        self._no_call(events)
                elif state == self._head:
                    self._read = tag
                return True
            if tag.startswith(body):
                return False
        return self._no_call(events)

    def _no_call(self, events: list[Event]) -> bool:
        events += self._content.text(self._read) if self._read else []
        self._read, self._state = "", self._outside
        return True

    def _head(self, events: list[Event]) -> bool:
        end = self._tags.name_end
        head, found, rest = split(self._buffer, end or "<")
        if NAME.fullmatch(head) is None or (found and not head.strip()):
            return self._no_call(events)
        if not end and found:
            rest = "<" + rest
            if not any(tag.startswith(rest[: len(tag)]) for tag in (self._tags.key, self._tags.call_end)):
                return self._no_call(events)
            found = rest.startswith((self._tags.key, self._tags.call_end))
        if not found:
            return False
        self._name, self._buffer, self._read, self._any = head.strip(), rest, "", False
        self._content.call()
        events.append(ToolCallStart(self._count, self._name))
        self._state = self._between_parameters
        return True

    def _between_parameters(self, events: list[Event]) -> bool:
        found = self._next.search(self._buffer)
        if found is None:
            return False
        if found[0] == self._tags.key:
            self._buffer, self._state = self._buffer[found.end() :], self._in_key
            return True
        events.append(Arguments(self._count, "}" if self._any else "{}"))
        self._count += 1
        self._buffer = self._buffer[found.end() if found[0] == self._tags.call_end else found.start() :]
        self._state = self._between if self._tags.section else self._outside
        return True

    def _in_key(self, events: list[Event]) -> bool:
        key, found, rest = split(self._buffer, self._tags.key_end)
        if found:
            self._key, self._buffer, self._state = key.strip(), rest, self._before_value
        return found

    def _before_value(self, events: list[Event]) -> bool:
        tag, body = self._tags.value, self._buffer.lstrip() if self._tags.value else self._buffer
        if not body.startswith(tag):
            if tag.startswith(body):
                return False
            self._state = self._between_parameters
            return True
        self._buffer, self._state = body[len(tag) :], self._in_value
        self._types = declared_types(self._tools.get(self._name, {}).get(self._key))
        self._value, self._begun, self._newline = [], False, ""
        if self._types == STRING:
            events.append(Arguments(self._count, self._opening() + '"'))
        return bool(self._buffer)

    def _opening(self) -> str:
        """A parameter's name, and what comes before it."""
        before, self._any = ", " if self._any else "{", True
        return f'{before}"{quoted(self._key)}": '

    def _in_value(self, events: list[Event]) -> bool:
        text, found, self._buffer = split(self._buffer, self._tags.value_end)
        if self._types != STRING:
            self._value.append(text)
            if found:
                events.append(
                    Arguments(
                        self._count,
                        self._opening() + argument(self._trimmed("".join(self._value)), self._types),
                    )
                )
        elif piece := quoted(self._string(text, found)) + ('"' if found else ""):
            events.append(Arguments(self._count, piece))
        self._state = self._between_parameters if found else self._in_value
        return found

    def _trimmed(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._tags.newlines else text

    def _string(self, text: str, last: bool) -> str:
        """The next piece of a string, without the newlines around it."""
        if not self._tags.newlines:
            return text
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\n")
        text = self._newline + text
        shown = text.removesuffix("\n")
        self._newline = "" if last else text[len(shown) :]
        return shown

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._read or self._state == self._outside:
            events += self._content.text(self._read + self._buffer)
        return joined([*events, *self._content.finish()])
