"""Lines of the log: one for each request, and every few seconds what the start or the engine does."""

from __future__ import annotations

import asyncio
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
from typing import Any, NamedTuple

from jengine import EngineDead, InvalidArgument, Load
from jengine.serving.processes.supervisor import NOT_LOADED, Supervisor

SPARSE_SECONDS = 10.0
MOST_CHARACTERS = 1000  # of a field
MOST_WAITING = 10_000  # maximum number of waiting lines; further ones are dropped
log = logging.getLogger("jengine.serving")


class SparseLog:
    """Writes one message per SPARSE_SECONDS. The next one includes the number of suppressed messages.

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
        self._next, self._left_out = now + SPARSE_SECONDS, 0
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


SECONDS = 10.0  # between two lines


class StatusSample(NamedTuple):
    """The state at one time. Counters never decrease.

    Attributes:
        at: monotonic seconds.
        prompt_tokens: computed so far; tokens from the prefix cache do not count.
        generated: tokens generated so far.
    """

    at: float
    load: Load
    prompt_tokens: int
    generated: int


def line(before: StatusSample, now: StatusSample) -> str | None:
    """Describes the time between two samples; None if nothing happened."""
    load, old = now.load, before.load
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generated - before.generated
    parts = []
    if prompt or generated or load.running or load.waiting:
        seconds = max(now.at - before.at, 1e-9)
        looked_up, hits = load.prefix_queries - old.prefix_queries, load.prefix_hits - old.prefix_hits
        parts = [
            f"running: {load.running}, waiting: {load.waiting}",
            f"prompt: {prompt / seconds:.1f} tokens/s",
            f"generation: {generated / seconds:.1f} tokens/s",
            f"KV cache: {100 * (load.pages - load.free_pages) / max(load.pages, 1):.1f} %",
            f"prefix hits: {100 * hits / looked_up:.1f} %" if looked_up else "prefix hits: none looked up",
        ]
    if load.programs_ready != old.programs_ready:
        some = "all" if load.programs_ready == load.programs else f"{load.programs_ready} of"
        parts.append(f"{some} {load.programs} programs are ready")
    return "; ".join(parts) or None


async def write_status(engine: Supervisor, name: str = "") -> None:
    """Writes lines until it is cancelled; each begins with the model's name, if that is given.

    While the engine starts there is a line only without a terminal, which shows progress bars instead.
    """
    before: StatusSample | None = None
    begin = name and f"{name}: "
    while True:
        try:
            prompt_tokens = engine.totals.prompt_tokens
            now = StatusSample(time.monotonic(), engine.load, prompt_tokens, engine.generated)
            if text := before and line(before, now):
                log.info("%s%s", begin, text)
            before = now
        except EngineDead:
            before = None
            if not sys.stderr.isatty() and (why := engine.why_not_ready) != NOT_LOADED:
                log.info("%s%s", begin, why)
        await asyncio.sleep(SECONDS)


class Lines(logging.Formatter):
    """Clients' names and paths cannot forge lines or control a terminal: characters that are not printed are
    escaped, and further lines of a message are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


def escaped(text: str) -> str:
    if text.isprintable():
        return text
    lines = text.split("\n")
    return "\n    ".join(
        "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode()
            for character in line
        )
        for line in lines
    )
