"""JSON in a model's text: calls, read character by character so that arguments can be streamed, and values of
parameters that are written as plain text.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any
from urllib.parse import unquote

from jengine.serving.parsers.events import Arguments, Event, OutputParser, ToolCallStart, clean, joined

MORE, LAST, BEFORE = "more", "last", "before"  # whether a character continues a value, ends it, or follows it
# characters of JSON outside strings
PLAIN = frozenset(" \t\r\n,:+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
SCALAR = PLAIN - frozenset(" \t\r\n,:")
FUNCTION = "function"  # its value is a name, or an object with the call's other keys
NAMES, ARGUMENTS = ("name", FUNCTION), ("arguments", "parameters")
BEFORE_NAME = (*NAMES, *ARGUMENTS, "type", "id", "index")  # keys before a call's name


class JsonValue:
    """Finds the end of a JSON value. Brackets are counted, not matched."""

    def __init__(self) -> None:
        self._depth, self._string, self._escape = 0, False, False
        self._escaped = False  # whether the last character followed a backslash

    def feed(self, character: str) -> str:
        """MORE, LAST or BEFORE."""
        self._escaped = self._escape
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

    def escaped(self, character: str) -> str:
        """The character that was fed last, as JSON writes it: some models write line breaks in strings."""
        if not self._string or character >= " ":
            return character
        return "\\" * self._escaped + json.dumps(character)[1:-1]

    def all_escaped(self, text: str) -> str:
        """Text of values, of which every character is fed."""
        return "".join([self.escaped(character) for character in text if self.feed(character)])

    def read(self, text: str) -> tuple[str, int, bool]:
        """(the part of the text that belongs to the value, escaped; its length; whether the value ends)."""
        shown = list[str]()
        for at, character in enumerate(text):
            status = self.feed(character)
            if status == BEFORE:
                return "".join(shown), at, True
            shown.append(self.escaped(character))
            if status == LAST:
                return "".join(shown), at + 1, True
        return "".join(shown), len(text), False


class JsonCall:
    """Reads `{"name": "f", "arguments": {...}}`. Other keys are skipped.

    Args:
        index: the call's index.
        names: known names; an object with another name, or that begins with another key than those of calls,
            is not a call. None: all names.
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

    @property
    def empty(self) -> bool:
        """Whether no character has been read."""
        return self._state == "open"

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
                self._arguments.append(self._value.escaped(character))
        if status != MORE:
            self._value_ended()
        return status != BEFORE or self._before_key(character)

    def _key_ended(self, key: str) -> None:
        self._key, self._state = key, "colon"
        if (key in NAMES and self._name) or (key in ARGUMENTS and self._had):
            self._key = ""  # only the first one counts
        self._had = self._had or key in ARGUMENTS
        if self._names is not None and not (self._name or self._nested or key in BEFORE_NAME):
            self.failed = True  # an answer in JSON, which must not wait for its end

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


class NamedCall(OutputParser):
    """The whole text is one tool's arguments."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        start: list[Event] = [] if self._begun else [ToolCallStart(0, self._name)]
        self._begun = True
        return [*start, Arguments(0, text)]


class CallArray(OutputParser):
    """The text is a JSON array of calls."""

    def __init__(self) -> None:
        self._calls = CallList()

    def push(self, text: str) -> list[Event]:
        return joined(self._calls.feed(text)[1])


STRING = frozenset({"string"})
PYTHON = {"true": "boolean", "false": "boolean", "none": "null"}  # types of these words
MOST_DEPTH = 50  # of references and parts of a schema
TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def parameter_types(schema: Any) -> dict[str, frozenset[str]]:
    """The parameters that a tool's JSON schema declares, each with its types; empty if it does not say."""
    reader, parameters = _Types(schema), dict[str, frozenset[str]]()
    for part in reader.parts(schema):
        properties = part.get("properties")
        for name, parameter in properties.items() if isinstance(properties, dict) else ():
            parameters.setdefault(name, reader.of(parameter))
    return parameters


class _Types:
    """Reads the types of schemas. Each part of them is read once, since references may lead back to it.

    Args:
        root: the schema to which references belong.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, frozenset[str]] = {}  # by the schema's identity

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """The types that a schema allows. `depth`: of references and parts that lead to it."""
        if not isinstance(schema, dict) or depth > MOST_DEPTH:
            return frozenset()
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()
            self._known[id(schema)] = self._read(schema, depth)
        return self._known[id(schema)]

    def parts(self, schema: Any) -> list[dict[str, Any]]:
        """A schema, and those of which it consists."""
        parts: dict[int, dict[str, Any]] = {}
        left = [schema]
        while left:
            part = left.pop()
            if isinstance(part, dict) and id(part) not in parts:
                parts[id(part)] = part
                several = [part.get(name) for name in ("oneOf", "anyOf", "allOf")]
                left += [inner for listed in several if isinstance(listed, list) for inner in listed]
                left.append(_target(part, self._root))
        return [*parts.values()]

    def _read(self, schema: dict[str, Any], depth: int) -> frozenset[str]:
        declared = schema.get("type")
        kinds = declared if isinstance(declared, list) else [declared]
        types = frozenset(kind for kind in kinds if isinstance(kind, str))
        for name in ("anyOf", "oneOf"):
            parts = schema.get(name)
            for part in parts if isinstance(parts, list) else ():
                types |= self.of(part, depth + 1)
        if not types:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            values = values if isinstance(values, list) else []
            types = frozenset(TYPES[type(value)] for value in values if type(value) in TYPES)
        every = schema.get("allOf")
        for part in [_target(schema, self._root), *(every if isinstance(every, list) else ())]:
            types = _both(types, self.of(part, depth + 1))
        return types


def _both(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """The types that both allow, of which one may not say."""
    if not first or not second:
        return first or second
    return frozenset(
        kind
        for kind in first | second
        if all(kind in types or (kind == "integer" and "number" in types) for types in (first, second))
    )


def _target(schema: dict[str, Any], root: Any) -> Any:
    """What the schema's `$ref` points to; None if it is not in the root."""
    place = schema.get("$ref")
    if not isinstance(place, str) or not place.startswith("#"):
        return None
    value = root
    for step in unquote(place[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, dict):
            value = value.get(name)
        else:
            return None
    return value


def argument(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value. Text that is not JSON of one of the types is a string, if a string is allowed
    or it is not JSON. Some templates show values of earlier calls as Python does, and models copy that.
    """
    word = text.strip().lower()
    if "string" not in types and PYTHON.get(word) in types:
        text = word.replace("none", "null")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        kind = TYPES[type(value)]
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        if fits or "string" not in types:
            return clean(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        pass
    return f'"{quoted(text)}"'


def quoted(text: str) -> str:
    """Text within a JSON string, without the quotes. A longer text's is that of its pieces."""
    return clean(json.dumps(text, ensure_ascii=False)[1:-1])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
