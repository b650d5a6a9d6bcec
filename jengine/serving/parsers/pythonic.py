"""The pythonic format of Llama 3.2 and 4: the whole answer is `[f(city="Bonn", days=3), g()]`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from jengine.serving.parsers.events import Arguments, ContentTrimmer, Event, ToolCallStart, clean, joined

TAGS = ("<|python_start|>", "<|python_end|>")  # of Llama 4, around the list
CONSTANTS = {"true": True, "false": False, "null": None}
NEWLINE = re.compile(r"\r?\n")


class Brackets:
    """Follows brackets and quotes of Python code.

    Attributes:
        depth: of open brackets.
        quote: the open one, or empty.
    """

    def __init__(self) -> None:
        self.depth, self.quote, self._escape = 0, "", False

    def feed(self, character: str) -> None:
        if self.quote:
            if self._escape:
                self._escape = False
            elif character == "\\":
                self._escape = True
            elif character == self.quote:
                self.quote = ""
        elif self.depth and character in "\"'":
            self.quote = character
        elif character in "([{":
            self.depth += 1
        elif character in ")]}":
            self.depth -= 1


class Pythonic:
    """Emits a call when its parenthesis closes.

    An answer that begins differently, or with a call of an unknown tool, is content.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._content, self._count = names, ContentTrimmer(), 0
        self._buffer, self._over = "", False
        self._at = 0  # position up to which the buffer has been scanned
        self._opened, self._brackets = False, Brackets()

    def push(self, text: str) -> list[Event]:
        if self._over:
            return self._content.text(text)
        self._buffer += text
        events: list[Event] = []
        if not self._opened:
            body = self._buffer.lstrip()
            if body.startswith(TAGS[0]):
                body = body[len(TAGS[0]) :].lstrip()
            if not body or TAGS[0].startswith(body):
                return []
            if body[0] != "[":
                return self._as_content()
            self._opened, self._at = True, len(self._buffer) - len(body) + 1
        while self._at < len(self._buffer) and not self._over:
            self._scan(events)
        return joined(events)

    def _scan(self, events: list[Event]) -> None:
        character = self._buffer[self._at]
        self._at += 1
        brackets = self._brackets
        if brackets.depth:
            brackets.feed(character)
            if not brackets.depth:
                self._call(events)
        elif character == "]":
            self._end(events)
        elif character not in " \t\r\n," and not self._may_be_name(self._start(self._buffer[: self._at])):
            events += self._as_content()
        elif character == "(":
            brackets.feed(character)

    def _may_be_name(self, text: str) -> bool:
        """Whether a tool's name, or that and a parenthesis, may begin so."""
        if text.endswith("(") and text[:-1].rstrip() in self._names:
            return True
        return any(name.startswith(text.rstrip()) for name in self._names)

    def _start(self, text: str) -> str:
        """The text without the optional beginning."""
        text = text.lstrip()
        if not self._count:
            text = text.removeprefix(TAGS[0]).lstrip().removeprefix("[")
        return text.lstrip(" \t\r\n,")

    def _call(self, events: list[Event]) -> None:
        call = self._start(self._buffer[: self._at])
        head = call.partition("(")[0].rstrip()
        name = head if head in self._names else max(filter(call.startswith, self._names), key=len, default="")
        arguments = _arguments(call[len(name) :].lstrip()[1:-1])
        if not name or arguments is None:
            events += self._as_content()
            return
        self._content.call()
        events += [ToolCallStart(self._count, name), Arguments(self._count, arguments)]
        self._count += 1
        self._buffer, self._at = self._buffer[self._at :], 0

    def _end(self, events: list[Event]) -> None:
        """The list has ended."""
        if self._count:
            self._buffer = self._buffer[self._at :]
        events += self._as_content()

    def _as_content(self) -> list[Event]:
        """Treats the rest as content."""
        self._over = True
        rest, self._buffer = self._buffer, ""
        return self._content.text(rest)

    def finish(self) -> list[Event]:
        return joined([*([] if self._over else self._as_content()), *self._content.finish()])


def _arguments(text: str) -> str | None:
    """A call's arguments as JSON; None if they are not only keywords with literals. A keyword may be any
    name, such as `from`.
    """
    values: dict[str, Any] = {}
    try:
        for piece in _pieces(text):
            name, equals, value = piece.partition("=")
            if not equals or not name.strip() or name.strip()[0] in "\"'([{":
                return None
            values[name.strip()] = _value(_parsed(value.strip()))
        return clean(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _pieces(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets or quotes."""
    brackets, piece = Brackets(), ""
    brackets.depth = 1  # of the call
    for character in text:
        brackets.feed(character)
        if character == "," and brackets.depth == 1 and not brackets.quote:
            yield piece
            piece = ""
        else:
            piece += character
    if piece.strip():
        yield piece


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        if text[:1] not in ("'", '"'):
            raise
        return ast.parse(NEWLINE.sub(r"\\n", text), mode="eval").body  # a text with newlines


def _value(node: ast.expr) -> Any:
    """The value of a literal. Raises ValueError for other expressions."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_value(key)): _value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
