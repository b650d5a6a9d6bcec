"""The request log: one JSON line per request, written by a thread, so that a full disk or pipe delays no
request. Also rate-limits log
lines that unauthenticated clients could cause.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from jengine import InvalidArgument

SECONDS = 10.0
MOST_CHARACTERS = 1000  # of a field
MOST_WAITING = 10_000  # maximum number of waiting lines; further ones are dropped
log = logging.getLogger("jengine.serving")


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


class RequestLog:
    """Appends to a file, which may be renamed at any time (log rotation): the next line starts a new file.

    Args:
        path: path of the file; "-": stdout.

    Raises:
        InvalidArgument: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._handler = (
                logging.StreamHandler(sys.stdout)
                if str(path) == "-"
                else WatchedFileHandler(path, encoding="utf-8")
            )
        except OSError as wrong:
            raise InvalidArgument("request_log", str(path), f"cannot be written: {wrong.strerror}") from None
        self._handler.handleError = self._failed  # type: ignore[method-assign]
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._lost = SparseLog(log.error)
        self._thread = threading.Thread(target=self._write, name="request-log", daemon=True)
        self._thread.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Returns immediately."""
        try:
            cut = {
                name: value[:MOST_CHARACTERS] if isinstance(value, str) else value
                for name, value in entry.items()
            }
            self._lines.put_nowait(json.dumps(cut, ensure_ascii=False))
        except queue.Full:
            self._lost("the request log cannot be written fast enough; lines are dropped")

    def close(self, seconds: float = 2.0) -> None:
        """Writes the waiting lines, for at most this time."""
        try:
            self._lines.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)
        if not self._thread.is_alive() and isinstance(self._handler, WatchedFileHandler):
            with contextlib.suppress(OSError):  # earlier write errors would repeat
                self._handler.close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._handler.handle(logging.makeLogRecord({"msg": line}))

    def _failed(self, record: logging.LogRecord) -> None:
        self._lost("the request log cannot be written: %s", sys.exception())
