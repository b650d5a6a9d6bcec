"""Events that parsers find in a model's text, and base classes of parsers.

A parser is a small state machine. It reads text in arbitrary pieces, and emits events as soon as they are
certain. The joined events do not depend on the pieces, so complete answers are parsed with one `push` and
`finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class Stepwise:
    """Base class that buffers text and reads it step by step, as far as it is certain."""

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
        raise NotImplementedError


class PlainText:
    """Treats everything as content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


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


def split(text: str, marker: str) -> tuple[str, bool, str]:
    """The text before the marker, whether it was found, and the rest. Without it, the rest is a possible
    beginning of the marker."""
    at = text.find(marker)
    if at >= 0:
        return text[:at], True, text[at + len(marker) :]
    held = next(
        (size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0
    )
    return text[: len(text) - held], False, text[len(text) - held :]


def split_at(text: str, *markers: str) -> tuple[str, str, str]:
    """The text before the first of the markers, that marker, and the rest. Without one, the rest is a
    possible beginning of a marker.
    """
    at, marker = min(
        ((at, candidate) for candidate in markers if (at := text.find(candidate)) >= 0), default=(-1, "")
    )
    if marker:
        return text[:at], marker, text[at + len(marker) :]
    held = max(len(split(text, candidate)[2]) for candidate in markers)
    return text[: len(text) - held], "", text[len(text) - held :]


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
