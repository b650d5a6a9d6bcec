"""Llama 3's format: the whole answer is `{"name": ..., "parameters": {...}}`, or several of these separated
by semicolons.
"""

from __future__ import annotations

from collections.abc import Container

from jengine.serving.parsers.events import Event, Held, joined
from jengine.serving.parsers.json_calls import CallList

TAG = "<|python_tag|>"  # optional, at the beginning


class LlamaJson:
    """An answer that begins differently, or with a call of an unknown tool, is content.

    Args:
        names: names of the tools.
    """

    def __init__(self, names: Container[str]) -> None:
        self._calls = CallList(names=names, between=";,", array=False)
        self._content = Held()
        self._read = ""  # text read before a call began
        self._opened = self._over = False

    def push(self, text: str) -> list[Event]:
        if self._over:
            return self._content.text(text)
        if not self._calls.count:
            self._read += text
        if not self._opened:
            body = self._read.lstrip()
            if body.startswith(TAG):
                body = body[len(TAG) :].lstrip()
            if not body or TAG.startswith(body):
                return []
            if body[0] != "{":
                return self._as_content("")
            self._opened, text = True, body
        at, events = self._calls.feed(text)
        if self._calls.count and self._read:
            self._content.call()
            self._read = ""
        if self._calls.done:
            events += self._as_content(self._calls.raw + text[at:])
        return joined(events)

    def _as_content(self, rest: str) -> list[Event]:
        """Treats the rest as content, and all text if there was no call."""
        self._over = True
        return self._content.text(rest if self._calls.count else self._read)

    def finish(self) -> list[Event]:
        events = [] if self._over else self._as_content(self._calls.finish())
        return joined([*events, *self._content.finish()])
