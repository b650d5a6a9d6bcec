"""How often streams write, so that under load tokens gather in fewer messages."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jengine import Readers

MESSAGE_SECONDS = 100e-6  # of the event loop's time, that a message takes
CORES_SHARE = 0.04  # of the processor time of all cores, for the messages of all streams together: the engine may need them
LOOP_SHARE = 0.5  # of the event loop's time, at most
LONGEST = 0.1  # seconds
WAITING = 0.5  # seconds from which on a write waits for its client


class Pace:
    """Bounds the share of the processor that streams take.

    A message costs the server's process and its client much more than a token in it does. With few streams each token goes out as it
    comes; with many, a stream waits between two messages, and the tokens that come meanwhile go out together. The first and the last
    message of a stream wait for nothing.

    Args:
        cores: that this process may use; None finds out.

    Attributes:
        writing: streams that write a message, by when they began, time.monotonic().
    """

    def __init__(self, cores: int | None = None) -> None:
        self._streams = 0
        self.writing: dict[object, float] = {}
        self._share = min(CORES_SHARE * (cores or _cores()), LOOP_SHARE)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts one more stream within this."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def readers(self) -> Readers:
        """How clients read now."""
        now = time.monotonic()
        waits = [now - since for since in self.writing.values() if now - since >= WAITING]
        return Readers(streams=self._streams, waiting=len(waits), longest=max(waits, default=0.0))

    @property
    def seconds(self) -> float:
        """Between two messages of a stream."""
        return min(self._streams * MESSAGE_SECONDS / self._share, LONGEST)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
