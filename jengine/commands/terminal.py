"""Writes to the terminal."""

from __future__ import annotations

import os
import sys


def write(text: str) -> None:
    """Writes to stdout and flushes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Writes a line to stderr, dimmed on terminals with styles."""
    print(f"\033[2m{text}\033[0m" if _styled() else text, file=sys.stderr, flush=True)


def _styled() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
