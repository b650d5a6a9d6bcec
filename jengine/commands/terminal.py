"""Writes to the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def write(text: str) -> None:
    """Writes to stdout and flushes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line to stderr, dimmed on terminals with styles."""
    print(f"\033[2m{text}\033[0m" if _styled() else text, file=sys.stderr, flush=True)


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
