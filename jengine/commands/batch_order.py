"""Orders a file's requests: requests with a common prefix together, long ones first."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator

from jengine.commands.batch_lines import Line

WINDOW = 4096  # number of requests sorted at a time
WINDOW_CHARACTERS = 2**26  # maximum total length of their prompts
SHARED = 256  # minimum characters of a common prefix that matters: a few pages
COMPARED = 2**14  # characters of a prompt used for sorting
CHARACTERS = 4  # approximate characters in a token


def ordered(lines: Iterable[Line]) -> Iterator[Line]:
    """All lines, window by window. Memory is bounded by the window."""
    window: list[tuple[str, int, Line]] = []
    characters = 0
    for line in lines:
        text = _text(line)
        window.append((text[:COMPARED], _cost(line, text), line))
        characters += len(text)
        if len(window) >= WINDOW or characters >= WINDOW_CHARACTERS:
            yield from _in_order(window)
            window, characters = [], 0
    yield from _in_order(window)


def _in_order(window: list[tuple[str, int, Line]]) -> Iterator[Line]:
    """Prompts with a common beginning follow each other, so that its pages are computed once and are still
    there for the next. Longest first, since a long one that begins last is waited for alone.
    """
    window.sort(key=lambda entry: entry[0])
    groups = [list(group) for _, group in itertools.groupby(window, key=_beginning)]
    groups.sort(key=lambda group: max(cost for _, cost, _ in group), reverse=True)
    return (line for group in groups for _, _, line in group)


def _beginning(entry: tuple[str, int, Line]) -> tuple[str, int]:
    """The key of a group: a long prefix, or the request itself."""
    text, _, line = entry
    return (text[:SHARED], 0) if len(text) >= SHARED else (text, line.number)


def _text(line: Line) -> str:
    """The beginning of a prompt. For a conversation, texts with equal beginnings if the conversations have
    them.
    """
    if line.error is not None:
        return ""
    if isinstance(line.prompt, str):
        return line.prompt
    if not isinstance(line.prompt, dict):
        return json.dumps([line.chat.get("tools"), line.prompt])
    body = line.prompt
    prompt = body.get("prompt", body.get("input"))
    return (
        prompt if isinstance(prompt, str) else json.dumps([body.get("tools"), body.get("messages", prompt)])
    )


def _cost(line: Line, text: str) -> int:
    """Approximate number of characters to read and to generate."""
    if isinstance(line.prompt, dict):
        most = line.prompt.get("max_completion_tokens") or line.prompt.get("max_tokens")
    else:
        most = None if line.params is None else line.params.max_tokens
    return len(text) + CHARACTERS * (most if isinstance(most, int) else 0)
