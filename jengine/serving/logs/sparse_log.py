"""Rate-limits log lines that unauthenticated clients could cause."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 10.0


class SparseLog:
    """Writes one message per SECONDS. The next one includes the number of suppressed messages.

    Args:
        write: a function like `logging.Logger.warning`.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write, self._next, self._left_out = write, 0.0, 0

    def __call__(self, message: str, *arguments: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more like this)" if self._left_out else ""
        self._next, self._left_out = now + SECONDS, 0
        self._write(message + more, *arguments)
