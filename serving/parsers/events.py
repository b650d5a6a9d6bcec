"""What a parser finds in a model's text, and parsers in general.

A parser is a small state machine: text goes in, cut anywhere, and events come out as early as they are certain. Joined, they do not
depend on the cuts: `push` of a whole text and `finish` is how whole answers are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what comes before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call begins; calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON text."""

    index: int
    text: str


Event = Content | Reasoning | Call | Arguments


class Parser(Protocol):
    """Reads one completion."""

    def push(self, text: str) -> list[Event]:
        """More text has come."""

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""


class Stepwise:
    """Collects text, and reads as much of it as is certain, step by step."""

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
    """Everything is content."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def joined(events: list[Event]) -> list[Event]:
    """With neighbours of a kind as one."""
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
    """Without lone surrogates, which JSON and Python can write and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def split(text: str, marker: str) -> tuple[str, bool, str]:
    """What comes before the marker, whether it is there, and what comes after; without it, the rest is what may be its beginning."""
    at = text.find(marker)
    if at >= 0:
        return text[:at], True, text[at + len(marker) :]
    kept = next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:size])), 0)
    return text[: len(text) - kept], False, text[len(text) - kept :]


class Held:
    """Content without the whitespace around tool calls: what may come before one is held back."""

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
        """A call begins here."""
        self._space, self._called, self._skips = "", True, True

    def finish(self) -> list[Event]:
        return [Content(self._space)] if self._space and not self._called else []
