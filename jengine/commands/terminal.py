"""Writes to the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jengine import InvalidArgument, JengineError
from jengine.base.display import counted

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
TIMES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def write(text: str) -> None:
    """Writes to stdout and flushes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def json_text(values: dict[str, Any], indent: int | None = None) -> str:
    """JSON that ends with a newline. Infinity and NaN, which JSON lacks, become null."""
    finite = json.loads(json.dumps(values), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent) + "\n"


def write_json(values: dict[str, Any]) -> None:
    """Writes one line of JSON to stdout."""
    write(json_text(values))


def note(text: str) -> None:
    """Writes a line to stderr, dimmed on terminals with styles."""
    print(f"\033[2m{text}\033[0m" if _styled() else text, file=sys.stderr, flush=True)


def check_output(name: str, path: Path | None) -> None:
    """Checks the file of a result, before the work that takes long. Raises InvalidArgument, naming the
    option.
    """
    if path is None:
        return
    try:
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as wrong:
        raise InvalidArgument(name, str(path), f"cannot be written: {wrong.strerror}") from None


def agreed(question: str) -> bool:
    """Asks at the terminal.

    Raises:
        JengineError: there is none.
    """
    if not sys.stdin.isatty():
        raise JengineError("there is no terminal to ask at: give --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def size_text(number: int) -> str:
    """Such as 1.5 GiB."""
    unit, name = next((unit for unit in UNITS if number >= unit[0]), (1, "bytes"))
    return f"{number / unit:.1f} {name}" if unit > 1 else f"{number} {name}"


def ago(seconds: float) -> str:
    """Such as 3 hours ago."""
    unit, name = next((unit for unit in TIMES if seconds >= unit[0]), (0.0, ""))
    return f"{counted(int(seconds // unit), name)} ago" if unit else "now"


@contextmanager
def passing() -> Iterator[Callable[[str], None]]:
    """A context for a line on stderr, a terminal, that each call replaces. It is removed at the end."""
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = True
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _styled() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
