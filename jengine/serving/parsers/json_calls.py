"""Reads tool calls written as JSON objects character by character, so that arguments can be streamed."""

from __future__ import annotations

import json
from collections.abc import Container

from jengine.serving.parsers.events import Arguments, Event, ToolCallStart, clean, joined

MORE, LAST, BEFORE = "more", "last", "before"  # whether a character continues a value, ends it, or follows it
# characters of JSON outside strings
PLAIN = frozenset(" \t\r\n,:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
SCALAR = PLAIN - frozenset(" \t\r\n,:")
FUNCTION = "function"  # its value is a name, or an object with the call's other keys
NAMES, ARGUMENTS = ("name", FUNCTION), ("arguments", "parameters")


class JsonValue:
    """Finds the end of a JSON value. Brackets are counted, not matched."""

    def __init__(self) -> None:
        self._depth, self._string, self._escape = 0, False, False

    def feed(self, character: str) -> str:
        """MORE, LAST or BEFORE."""
        if self._string:
            if self._escape:
                self._escape = False
            elif character == "\\":
                self._escape = True
            elif character == '"':
                self._string = False
                return MORE if self._depth else LAST
            return MORE
        if character == '"':
            self._string = True
            return MORE
        if character in "{[":
            self._depth += 1
            return MORE
        if character in "}]":
            if not self._depth:
                return BEFORE
            self._depth -= 1
            return MORE if self._depth else LAST
        return MORE if character in (PLAIN if self._depth else SCALAR) else BEFORE


class JsonCall:
    """Reads `{"name": "f", "arguments": {...}}`. Other keys are skipped.

    Args:
        index: the call's index.
        names: known names; an object with another name is not a call. None: all names.
        bare: whether an object without arguments is not a call either.

    Attributes:
        begun: whether its name is known and has been emitted.
        done: whether its end has been read, or it was cut off by invalid characters.
        failed: whether it is not a call; nothing has been emitted then.
    """

    def __init__(self, index: int, names: Container[str] | None = None, bare: bool = False) -> None:
        self.begun = self.done = self.failed = False
        self._index, self._names, self._bare = index, names, bare
        self._state, self._key, self._value = "open", "", JsonValue()
        self._raw: list[str] = []  # text read before the call began
        self._text: list[str] = []  # of the current key or value
        self._name, self._nested = "", 0
        self._arguments: list[str] = []  # not emitted yet
        self._any = self._had = False  # whether some were emitted, and whether the key was found

    @property
    def raw(self) -> str:
        """The text read so far, if the call has not begun."""
        return "".join(self._raw)

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """(number of characters read, at most up to the call's end; events)."""
        for at, character in enumerate(text):
            if self.failed or self.done or not self._read(character):
                return at, self._news()
            if not self.begun:
                self._raw.append(character)
        return len(text), self._news()

    def _read(self, character: str) -> bool:
        """Returns whether the character belongs to the call."""
        if self._state == "open":
            self._state = "key"
            return True
        if self._state == "key":
            return self._before_key(character)
        if self._state == "in key":
            self._text.append(character)
            if self._value.feed(character) == LAST:
                self._key_ended(_string("".join(self._text)))
            return True
        if self._state == "colon":
            if character == ":":
                self._state, self._text, self._value = "value", [], JsonValue()
                return True
            return character.isspace() or self._cut_off()
        if not self._text and character.isspace():
            return True
        if not self._text and character == "{" and self._key == FUNCTION:
            self._nested += 1
            self._state = "key"
            return True
        status = self._value.feed(character)
        if status != BEFORE:
            self._text.append(character)
            if self._key in ARGUMENTS and self._text[0] in "{[":
                self._arguments.append(character)
        if status != MORE:
            self._value_ended()
        return status != BEFORE or self._before_key(character)

    def _key_ended(self, key: str) -> None:
        self._key, self._state = key, "colon"
        if (key in NAMES and self._name) or (key in ARGUMENTS and self._had):
            self._key = ""  # only the first one counts
        self._had = self._had or key in ARGUMENTS

    def _before_key(self, character: str) -> bool:
        if character == '"':
            self._state, self._text, self._value = "in key", [character], JsonValue()
            self._value.feed(character)
            return True
        if character == "}":
            if self._nested:
                self._nested -= 1
            else:
                self._over()
            return True
        return character.isspace() or character == "," or self._cut_off()

    def _cut_off(self) -> bool:
        self._over()
        return False

    def _over(self) -> None:
        """Ends the call. If its name is known, it counts as a call."""
        self.done = bool(self._name) and (self._had or not self._bare)
        self.failed = not self.done

    def _value_ended(self) -> None:
        self._state = "key"
        text = "".join(self._text)
        if self._key == FUNCTION and text[:1] != '"':
            return
        if self._key in NAMES:
            self._name = _string(text)
            self.failed = not self._name or (self._names is not None and self._name not in self._names)
        elif self._key in ARGUMENTS and text[:1] not in ("{", "["):
            # Some models write the arguments as a JSON string.
            self._arguments = [_string(text)] if text[:1] == '"' else [] if text == "null" else [text]

    def _news(self) -> list[Event]:
        if self.failed or not self._name or (self._bare and not self._had):
            return []
        events: list[Event] = [] if self.begun else [ToolCallStart(self._index, self._name)]
        self.begun = True
        more, self._arguments = "".join(self._arguments), []
        self._any = self._any or bool(more)
        if self.done and not self._any:
            more = "{}"
        return [*events, Arguments(self._index, more)] if more else events


class CallList:
    """Reads consecutive calls, in a JSON array or separated by one of the characters in `between`.

    Args:
        first: index of the first call.
        names, bare: see JsonCall.

    Attributes:
        count: number of calls that have begun.
        done: whether the array has ended, or an unexpected character follows, which is not read.
        raw: the text of an object that was not a call.
    """

    def __init__(
        self,
        first: int = 0,
        names: Container[str] | None = None,
        between: str = ",",
        array: bool = True,
        bare: bool = False,
    ) -> None:
        self.count, self.done, self.raw = 0, False, ""
        self._first, self._names, self._between, self._array = first, names, between, array
        self._bare = bare
        self._opened = not array
        self._call: JsonCall | None = None

    def feed(self, text: str) -> tuple[int, list[Event]]:
        """(number of characters read, events)."""
        events: list[Event] = []
        at = 0
        while at < len(text) and not self.done:
            if self._call is None:
                at += self._before_call(text[at])
            else:
                at += self._read(self._call, text[at:], events)
        return at, events

    def _before_call(self, character: str) -> int:
        """Number of characters read: 0 or 1."""
        if character == "{" and self._opened:
            self._call = JsonCall(self._first + self.count, self._names, self._bare)
            return 0
        if character == "[" and not self._opened:
            self._opened = True
        elif character == "]" and self._array and self._opened:
            self.done = True
        elif not (character.isspace() or (self.count and character in self._between)):
            self.done = True
            return 0
        return 1

    def _read(self, call: JsonCall, text: str, events: list[Event]) -> int:
        was = call.begun
        read, news = call.feed(text)
        events += news
        self.count += call.begun and not was
        if call.failed:
            self.raw, self.done = call.raw, True
        if call.failed or call.done:
            self._call = None
        return read

    def finish(self) -> str:
        """The text has ended: returns the text of a call that has not begun."""
        return self.raw if self._call is None or self._call.begun else self._call.raw


def _string(text: str) -> str:
    """Parses a JSON string; empty if it is invalid."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return ""
    return clean(value) if isinstance(value, str) else ""


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
