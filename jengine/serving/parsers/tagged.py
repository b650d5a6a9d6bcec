"""Calls between markers with JSON arguments (DeepSeek V3, R1 and V3.1, Kimi K2), and with a tag for each
parameter (GLM-4.5, MiniMax-M2, and Qwen3-Coder, whose format Qwen3.5 and 3.6 also use).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from jengine.serving.parsers.events import (
    Arguments,
    ContentTrimmer,
    Event,
    Stepwise,
    ToolCallStart,
    joined,
    split,
)
from jengine.serving.parsers.json_calls import STRING, JsonValue, argument, quoted


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
        self._state = self._outside
        self._arguments = JsonValue()

    def _outside(self, events: list[Event]) -> bool:
        text, mark, self._buffer = split(self._buffer, self._marks.begin, self._marks.call)
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
            self._buffer = rest
        elif ended:
            return self._no_call(events)
        elif not brace:
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
        shown, read, ended = self._arguments.read(self._buffer)
        events.append(Arguments(self._count, shown))
        self._buffer = self._buffer[read:]
        if ended:
            self._count, self._state = self._count + 1, self._after
        return ended

    def _after(self, events: list[Event]) -> bool:
        """What may follow arguments, such as the end of a code block, belongs to the call."""
        marks = self._marks
        text, mark, rest = split(self._buffer, marks.call_end, marks.call, marks.end)
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


NAME = re.compile(r"\s*[\w.:/-]*\s*")  # of an unknown tool, with whitespace around it
SPACE = re.compile(r"\s*")
ENDS, GOES_ON, UNKNOWN = "ends", "goes on", "unknown"  # what a tag within a value means


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

    A value may have tags: it ends at its closing tag if another tag or the end follows. Tags may be missing:
    those of the section, a call's closing tag, and a value's before the next parameter or the call's end.

    Text between the tags of a section that is not a call is content, including the tags.

    Args:
        tools: for each tool's name, the types of its parameters by name.
    """

    def __init__(self, tags: Tags, tools: Mapping[str, Mapping[str, frozenset[str]]]) -> None:
        super().__init__()
        self._tags, self._tools, self._content = tags, tools, ContentTrimmer()
        self._state = self._outside
        self._read = ""  # tags that are content unless a call follows
        self._bare = False  # the section's tag is missing
        self._count, self._name, self._key = 0, "", ""
        self._keys: set[str] = set()  # of the current call, up to now
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []  # pieces of a value that is not a string
        # whether text of a string was emitted; a newline that may be its last character
        self._begun, self._newline = False, ""
        self._last = ""  # the last character of a value, up to now
        ends = (tags.key, tags.call_end, tags.section_end, tags.call)
        self._next = re.compile("|".join(re.escape(tag) for tag in ends if tag))
        self._value_tags = (tags.value_end, tags.call_end, tags.key)  # at which a value may end
        self._within = re.compile("|".join(map(re.escape, self._value_tags)))
        self._after_value = tuple(tag for tag in ends if tag)
        self._after_call = tuple(tag for tag in (tags.section_end, tags.call, tags.section) if tag)

    def _outside(self, events: list[Event]) -> bool:
        section, call = self._tags.section, self._tags.call
        text, tag, self._buffer = split(self._buffer, *filter(None, (section, call)))
        events += self._content.text(text) if text else []
        if tag:
            self._read, self._bare = tag, bool(section) and tag == call
            self._state = self._between if tag == section else self._head
        return bool(tag)

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
        head, marker, rest = split(self._buffer, end or "<")
        whole = bool(marker)
        if not self._may_be_name(head, whole):
            return self._no_call(events)
        if not end and whole:
            rest = "<" + rest
            if not any(tag.startswith(rest[: len(tag)]) for tag in (self._tags.key, self._tags.call_end)):
                return self._no_call(events)
            whole = rest.startswith((self._tags.key, self._tags.call_end))
        if not whole:
            return False
        self._name, self._buffer, self._read, self._keys = head.strip(), rest, "", set()
        self._content.call()
        events.append(ToolCallStart(self._count, self._name))
        self._state = self._between_parameters
        return True

    def _may_be_name(self, text: str, whole: bool) -> bool:
        """Whether this is a tool's name, or its beginning. Where the section's tag is missing, the tool must
        be known.
        """
        if whole and text.strip() in self._tools:
            return True
        if not whole and any(name.startswith(text.strip()) for name in self._tools):
            return True
        unknown = not self._bare and NAME.fullmatch(text) is not None
        return unknown and (not whole or bool(text.strip()))

    def _between_parameters(self, events: list[Event]) -> bool:
        match = self._next.search(self._buffer)
        if match is None:
            return False
        if match[0] == self._tags.key:
            self._buffer, self._state = self._buffer[match.end() :], self._in_key
            return True
        events.append(Arguments(self._count, "}" if self._keys else "{}"))
        self._count += 1
        self._buffer = self._buffer[match.end() if match[0] == self._tags.call_end else match.start() :]
        self._state = self._between if self._tags.section else self._outside
        return True

    def _in_key(self, events: list[Event]) -> bool:
        key, marker, rest = split(self._buffer, self._tags.key_end)
        if marker:
            self._key, self._buffer, self._state = key.strip(), rest, self._before_value
        return bool(marker)

    def _before_value(self, events: list[Event]) -> bool:
        tag, body = self._tags.value, self._buffer.lstrip() if self._tags.value else self._buffer
        if not body.startswith(tag):
            if tag.startswith(body):
                return False
            self._state = self._between_parameters
            return True
        self._buffer, self._state = body[len(tag) :], self._in_value
        self._types = self._tools.get(self._name, {}).get(self._key, frozenset())
        self._value, self._begun, self._newline, self._last = [], False, "", "\n"
        if self._types == STRING:
            events.append(Arguments(self._count, self._opening() + '"'))
        return bool(self._buffer)

    def _opening(self) -> str:
        """A parameter's name, and what comes before it."""
        before = ", " if self._keys else "{"
        self._keys.add(self._key)
        return f'{before}"{quoted(self._key)}": '

    def _in_value(self, events: list[Event], over: bool = False) -> bool:
        """`over`: no more text comes."""
        buffer, at = self._buffer, 0
        while (tag := self._within.search(buffer, at)) is not None:
            meaning = self._meaning(tag[0], tag.end(), buffer[tag.start() - 1] if tag.start() else self._last)
            if meaning == UNKNOWN and over and tag[0] != self._tags.key:
                meaning = ENDS
            if meaning == GOES_ON:  # another tag may begin after this one's first character
                at = tag.start() + 1
                continue
            self._add(buffer[: tag.start()], meaning == ENDS, events)
            closed = meaning == ENDS and tag[0] == self._tags.value_end
            self._buffer = buffer[tag.end() if closed else tag.start() :]
            if meaning == ENDS:
                self._state = self._between_parameters
            return meaning == ENDS
        shown, _, self._buffer = split(buffer[at:], *self._value_tags)
        self._add(buffer[:at] + shown, False, events)
        return False

    def _meaning(self, tag: str, at: int, before: str) -> str:
        """Whether a value ends at a tag in it.

        Args:
            at: the place after the tag.
            before: the character before it.
        """
        if tag == self._tags.key:
            return self._meaning_of_key(at, before)
        following = self._after_value if tag == self._tags.value_end else self._after_call
        place = SPACE.match(self._buffer, at)
        assert place is not None  # it may be empty
        body = self._buffer[place.end() : place.end() + max(map(len, following))]
        if body.startswith(following):
            return ENDS
        return UNKNOWN if any(tag.startswith(body) for tag in following) else GOES_ON

    def _meaning_of_key(self, at: int, before: str) -> str:
        """The tag of a parameter's name ends a value without a closing tag if it begins a line, and the tool
        has this parameter, which the call does not have yet.
        """
        new = self._tools.get(self._name, {}).keys() - self._keys - {self._key}
        if before != "\n" or not new:
            return GOES_ON
        end = self._tags.key_end
        key, marker, _ = split(self._buffer[at : at + max(map(len, new)) + len(end)], end)
        if marker:
            return ENDS if key in new else GOES_ON
        return UNKNOWN if any(name.startswith(key) for name in new) else GOES_ON

    def _add(self, text: str, last: bool, events: list[Event]) -> None:
        """Adds text to a value, and ends it with the last one."""
        self._last = (text or self._last)[-1]
        if self._types == STRING:
            if piece := quoted(self._string(text, last)) + ('"' if last else ""):
                events.append(Arguments(self._count, piece))
            return
        self._value.append(text)
        if last:
            value = argument(self._trimmed("".join(self._value)), self._types)
            events.append(Arguments(self._count, self._opening() + value))

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
        goes_on = self._state == self._in_value
        while goes_on and self._buffer:
            inside = self._state == self._in_value
            goes_on = self._in_value(events, over=True) if inside else self._step(events)
        if self._read or self._state == self._outside:
            events += self._content.text(self._read + self._buffer)
        return joined([*events, *self._content.finish()])
