"""Reads a stream in the main thread so that Ctrl-C is safe."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any


def events_of(call: Iterator[Any]) -> Generator[Any]:
    """Yields a gRPC stream's messages on demand. Cancel the call before closing this.

    For the main thread, another thread reads: a KeyboardInterrupt inside gRPC could leave a lock of the
    channel acquired, and every later call would hang. Waiting on Python's own queue can be interrupted
    safely.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from call
        return
    wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: no more messages are wanted
    events: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(call, wanted, events), name="stream", daemon=True).start()
    try:
        while True:
            wanted.put(True)
            event, error = events.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield event
    finally:
        wanted.put(False)


def _read(
    call: Iterator[Any],
    wanted: queue.SimpleQueue[bool],
    events: queue.SimpleQueue[tuple[Any, BaseException | None]],
) -> None:
    error: BaseException | None = None
    while error is None and wanted.get():
        event = None
        try:
            event = next(call)
        except BaseException as ended:  # the stream's end, or an error
            error = ended
        events.put((event, error))
