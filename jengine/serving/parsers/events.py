"""Events that parsers find in a model's text, base classes of parsers, and thoughts of models that reason.

A parser is a small state machine. It reads text in arbitrary pieces, and emits events as soon as they are
certain. The joined events do not depend on the pieces, so complete answers are parsed with one `push` and
`finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

START, END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments: JSON text."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | Arguments


class OutputParser(Protocol):
    """Parses one completion."""

    def push(self, text: str) -> list[Event]:
        """Adds text."""

    def finish(self) -> list[Event]:
        """The text has ended: returns events for text that was held back."""
        return []


class Stepwise:
    """Base class that buffers text and reads it step by step, as far as it is certain."""

    _state: Callable[[list[Event]], bool]  # does the next step

    def __init__(self) -> None:
        self._buffer = ""

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._step(events):
            pass
        return joined(events)

    def _step(self, events: list[Event]) -> bool:
        """Reads from the buffer and adds events. Returns whether there may be more to do."""
        return self._state(events)


class PlainText(OutputParser):
    """Treats everything as content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []


def joined(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of the same kind."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Arguments) and isinstance(last, Arguments) and event.index == last.index:
            out[-1] = Arguments(event.index, last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        else:
            out.append(event)
    return out


def clean(text: str) -> str:
    """Removes lone surrogates, which JSON and Python can represent but UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def split(text: str, *markers: str) -> tuple[str, str, str]:
    """The text before the first of the markers, that marker, and the rest. Without one, the rest is a
    possible beginning of a marker.
    """
    at, marker = min(
        ((at, candidate) for candidate in markers if (at := text.find(candidate)) >= 0), default=(-1, "")
    )
    if marker:
        return text[:at], marker, text[at + len(marker) :]
    held = max(_held(text, candidate) for candidate in markers)
    return text[: len(text) - held], "", text[len(text) - held :]


def _held(text: str, marker: str) -> int:
    """Number of characters at the text's end that may be the beginning of the marker."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class ContentTrimmer:
    """Content without the whitespace around tool calls. Whitespace that may precede a call is held back."""

    def __init__(self) -> None:
        self._space = ""
        self._called = self._skips = False

    def text(self, text: str) -> list[Event]:
        text = self._space + text
        if self._skips:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._skips = self._skips and not shown
        return [Content(shown)] if shown else []

    def call(self) -> None:
        """A call begins."""
        self._space, self._called, self._skips = "", True, True

    def finish(self) -> list[Event]:
        return [Content(self._space)] if self._space and not self._called else []


def open_thought(turn: str) -> bool | None:
    """Whether the last turn of a prompt leaves a thought open; None: it has none."""
    start, end = turn.rfind(START), turn.rfind(END)
    return None if start == end else start > end


class ThinkParser:
    """Extracts the reasoning, without surrounding newlines, and passes the rest to another parser.

    Args:
        inside: whether the text begins within the reasoning: the prompt has the opening tag, or the model
            writes none.
        call: the marker of a tool call, which ends the reasoning, too, since some models forget its closing
            tag. Within a line it is quoted, unless it is a special token.
    """

    def __init__(self, rest: OutputParser, inside: bool, call: str = "") -> None:
        self._rest, self._inside, self._ends = rest, inside, (END, call) if call else (END,)
        self._within = False  # whether the line of the reasoning that is shown has begun
        self._buffer, self._state = "", "before"

    def push(self, text: str) -> list[Event]:
        if self._state in ("after", "content"):
            return self._after(text)
        self._buffer += text
        events: list[Event] = []
        if self._state == "before":
            body = self._buffer.lstrip()
            if START.startswith(body) and body != START:  # empty, or an incomplete tag
                return []
            if body.startswith(START):
                self._state, self._buffer = "open", body[len(START) :]
            elif self._inside:
                self._state = "open"
            else:
                self._state, text, self._buffer = "content", self._buffer, ""
                return self._rest.push(text)
        if self._state == "open":  # before the first visible character
            self._buffer = self._buffer.lstrip("\r\n")
            self._state = "in" if self._buffer else "open"
        text, marker, self._buffer = split(self._buffer, *self._ends)
        while self._quotes(text, marker):
            more, following, self._buffer = split(self._buffer, *self._ends)
            text, marker = text + marker + more, following
        shown = text.rstrip("\r\n")
        if shown:
            events.append(Reasoning(shown))
            self._within = self._begins_line(shown)
        if marker:
            text, self._buffer, self._state = marker.removeprefix(END) + self._buffer, "", "after"
            return joined([*events, *self._after(text)])
        self._buffer = text[len(shown) :] + self._buffer
        return events

    def _quotes(self, text: str, marker: str) -> bool:
        """Whether a marker behind this text of the reasoning only names a call."""
        special = marker.startswith(("<|", "<\uff5c"))
        return marker not in ("", END) and not special and self._begins_line(text)

    def _begins_line(self, text: str) -> bool:
        """Whether the last line of the reasoning has visible characters, with this text."""
        _, newline, line = text.rpartition("\n")
        return bool(line.strip()) or (self._within and not newline)

    def _after(self, text: str) -> list[Event]:
        """The answer, without leading newlines."""
        if self._state == "after":
            text = text.lstrip("\r\n")
            if not text:
                return []
            self._state = "content"
        return self._rest.push(text)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._state == "before" and self._buffer:
            events = [Reasoning(self._buffer)] if self._inside else self._rest.push(self._buffer)
        elif self._buffer:
            events = [Reasoning(self._buffer)]
        self._buffer = ""
        return joined([*events, *self._rest.finish()])
