"""How objects are displayed: one line in a terminal, a small table or text in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec

_QUIET = 'style="opacity: 0.6; font-size: 90%"'
_LEFT = 'style="text-align: left"'
_TEXT = 'style="white-space: pre-wrap; margin: 0"'


def short(text: str | None, limit: int = 60) -> str:
    """A text's repr, cut after `limit` characters."""
    return repr(text) if text is None or len(text) <= limit else f"{text[:limit]!r}..."


def counted(number: int, what: str) -> str:
    """A number with its noun: 1 token, 2 tokens."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def table_html(rows: Iterable[tuple[str, str]]) -> str:
    """A table of names and values, escaped."""
    cells = (
        f"<tr><th {_LEFT}>{escape(name)}</th><td {_LEFT}>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{''.join(cells)}</table>"


@dataclass(frozen=True)
class Summary:
    """A line in a terminal and a table in a notebook. It keeps no reference to what it describes.

    Attributes:
        kind: the name of the described object's class.
        rows: names and values; the first is the object's own.
    """

    kind: str
    rows: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        (_, name), *others = self.rows
        return f"{self.kind}({name!r}, {', '.join(value for _, value in others)})"

    def _repr_html_(self) -> str:
        return table_html(self.rows)


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Container[int] = (0,)) -> str:
    """A table for a terminal: figures are aligned on the right, and the columns `texts` on the left."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.ljust if i in texts else str.rjust for i in range(len(head))]
    lines = [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def columns_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a notebook, escaped."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def image_html(plot: Callable[[], bytes], alt: str) -> str:
    """The PNG drawn by `plot`; empty if matplotlib is not installed. alt: description of the image."""
    if find_spec("matplotlib") is None:
        return ""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(plot()).decode()}"/>'


def answer_html(prompt: str, completions: Iterable[tuple[str, str]]) -> str:
    """A prompt, and each (text, note) that continues it, escaped."""
    parts = (
        f"<pre {_TEXT}><span {_QUIET}>{escape(prompt)}</span>{escape(text)}</pre><div"
        f" {_QUIET}>{escape(note)}</div>"
        for text, note in completions
    )
    return f"<div>{''.join(parts)}</div>"
