"""Thoughts of models that reason: whether a prompt leaves one open."""

from __future__ import annotations

import re

from jengine import Tokenizer
from jengine.serving.parsers.events import Event, OutputParser, Reasoning, joined, split

START, END = "<think>", "</think>"


class Turns:
    """Finds the last turn of a prompt: what follows the last of the tokens that templates write around
    messages.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        marks = [token for token in added if token.strip() and token not in (START, END)]
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None

    def last(self, prompt: str) -> str:
        if self._marks is None:
            return prompt
        return prompt[max((mark.end() for mark in self._marks.finditer(prompt)), default=0) :]


def open_thought(turn: str) -> bool | None:
    """Whether the last turn of a prompt leaves a thought open; None: it has none."""
    start, end = turn.rfind(START), turn.rfind(END)
    return None if start == end else start > end


class ThinkParser:
    """Extracts the reasoning, without surrounding newlines, and passes the rest to another parser.

    Args:
        inside: whether the text begins within the reasoning: the prompt has the opening tag, or the model
            writes none.
    """

    def __init__(self, rest: OutputParser, inside: bool) -> None:
        self._rest, self._inside = rest, inside
        self._buffer, self._state = "", "before"

    def push(self, text: str) -> list[Event]:
        if self._state == "after":
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
        if self._state == "content":
            text, self._buffer = self._buffer, ""
            return self._rest.push(text)
        if self._state == "open":  # before the first visible character
            self._buffer = self._buffer.lstrip("\r\n")
            self._state = "in" if self._buffer else "open"
        text, marker, self._buffer = split(self._buffer, END)
        shown = text.rstrip("\r\n")
        if shown:
            events.append(Reasoning(shown))
        if marker:
            text, self._buffer, self._state = self._buffer, "", "after"
            return joined([*events, *self._after(text)])
        self._buffer = text[len(shown) :] + self._buffer
        return events

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
