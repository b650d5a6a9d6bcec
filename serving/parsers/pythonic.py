"""The pythonic format of Llama 3.2 and 4: the whole answer is `[f(city="Bonn", days=3), g()]`."""

from __future__ import annotations

import ast
import json
from collections.abc import Container
from typing import Any

from jengine.serving.parsers.events import Arguments, Event, Held, ToolCallStart, clean, joined

TAGS = ("<|python_start|>", "<|python_end|>")  # of Llama 4, around the list
CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic:
    """Emits a call when its parenthesis closes.

    An answer that begins differently, or with a call of an unknown tool, is content.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Container[str]) -> None:
        self._names, self._content, self._count = names, Held(), 0
        self._buffer, self._over = "", False
        self._at = 0  # position up to which the buffer has been scanned
        self._opened, self._depth, self._quote, self._escape = False, 0, "", False

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
        if self._quote:
            if self._escape:
                self._escape = False
            elif character == "\\":
                self._escape = True
            elif character == self._quote:
                self._quote = ""
        elif self._depth and character in "\"'":
            self._quote = character
        elif character in "([{":
            if not self._depth and not self._known():
                events += self._as_content()
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self._call(events)
            elif self._depth < 0:
                self._end(events)
        elif not self._depth and not (character.isalnum() or character in "_.-, \t\r\n"):
            events += self._as_content()

    def _known(self) -> bool:
        """Whether a tool's name precedes the parenthesis that was just read."""
        return self._buffer[self._at - 1] == "(" and self._start(self._buffer[: self._at - 1]) in self._names

    def _start(self, text: str) -> str:
        """The text without the optional beginning."""
        text = text.lstrip()
        if not self._count:
            text = text.removeprefix(TAGS[0]).lstrip().removeprefix("[")
        return text.lstrip(" \t\r\n,")

    def _call(self, events: list[Event]) -> None:
        read = _read(self._start(self._buffer[: self._at]))
        if read is None:
            events += self._as_content()
            return
        name, arguments = read
        self._content.call()
        events += [
            ToolCallStart(self._count, name),
            Arguments(self._count, clean(json.dumps(arguments, ensure_ascii=False))),
        ]
        self._count += 1
        self._buffer, self._at = self._buffer[self._at :], 0

    def _end(self, events: list[Event]) -> None:
        """The list has ended."""
        if not self._count:
            events += self._as_content()
            return
        self._buffer = self._buffer[self._at :]
        events += self._as_content()

    def _as_content(self) -> list[Event]:
        """Treats the rest as content."""
        self._over = True
        rest, self._buffer = self._buffer, ""
        return self._content.text(rest)

    def finish(self) -> list[Event]:
        return joined([*([] if self._over else self._as_content()), *self._content.finish()])


def _read(text: str) -> tuple[str, dict[str, Any]] | None:
    """A call's name and arguments; None if it is not a call with only keywords and literals."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        json.dumps(arguments)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text.partition("(")[0].strip(), {str(name): value for name, value in arguments.items()}


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
