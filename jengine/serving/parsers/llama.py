"""Llama 3's format: the whole answer is `{"name": ..., "parameters": {...}}`, several of these separated by
semicolons, or a JSON array of them, as models write whose chat template has no tools.
"""

from __future__ import annotations

import re
from collections.abc import Container

from jengine.serving.parsers.events import ContentTrimmer, Event, OutputParser, PlainText, joined
from jengine.serving.parsers.json_calls import CallList

TAG = "<|python_tag|>"  # optional, at the beginning
FENCE = re.compile(r"```\w{0,20}\s*")  # models often write calls in a code block
FENCE_BEGINS = re.compile(r"`{1,3}|```\w{0,20}\s*")


class LlamaJson:
    """An answer that begins differently, or with a call of an unknown tool, is no call.

    Args:
        names: names of the tools.
        rest: reads an answer that is no call.
    """

    def __init__(self, names: Container[str], rest: OutputParser | None = None) -> None:
        self._names, self._rest = names, rest or PlainText()
        self._calls = CallList(names=names, between=";,", array=False)
        self._content = ContentTrimmer()
        self._read = ""  # text read before a call began
        self._opened = self._over = self._fenced = False

    def push(self, text: str) -> list[Event]:
        if self._over:
            return self._after(text)
        if not self._calls.count:
            self._read += text
        if not self._opened:
            body = self._read.lstrip()
            if body.startswith(TAG):
                body = body[len(TAG) :].lstrip()
            if not body or TAG.startswith(body) or FENCE_BEGINS.fullmatch(body):
                return []
            if fence := FENCE.match(body):
                self._fenced, body = True, body[fence.end() :]
            if body[0] not in "{[":
                return self._end("")
            if body[0] == "[":
                self._calls = CallList(names=self._names)
            self._opened, text = True, body
        at, events = self._calls.feed(text)
        if self._calls.count and self._read:
            self._content.call()
            self._read = ""
        if self._calls.done:
            events += self._end(self._calls.raw + text[at:])
        return joined(events)

    def _end(self, text: str) -> list[Event]:
        """The calls have ended, before this text, or there were none."""
        self._over = True
        return self._after(text if self._calls.count else self._read)

    def _after(self, text: str) -> list[Event]:
        if not self._calls.count:
            return self._rest.push(text)
        if self._fenced:
            self._read += text
            body = self._read.lstrip()
            if len(body) < 3 and "```".startswith(body):
                return []
            self._fenced, text = False, body.removeprefix("```")
        return self._content.text(text)

    def finish(self) -> list[Event]:
        events = [] if self._over else self._end(self._calls.finish())
        return joined([*events, *self._content.finish(), *self._rest.finish()])
