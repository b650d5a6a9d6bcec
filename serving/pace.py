"""How often streams write, so that under load tokens gather in fewer messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE_SECONDS = 100e-6  # of the event loop's time, that a message takes
CORES_SHARE = 0.04  # of the processor time of all cores, for the messages of all streams together: the engine may need them
LOOP_SHARE = 0.5  # of the event loop's time, at most
LONGEST = 0.1  # seconds


class Pace:
    """Bounds the share of the processor that streams take.

    A message costs the server's process and its client much more than a token in it does. With few streams each token goes out as it
    comes; with many, a stream waits between two messages, and the tokens that come meanwhile go out together. The first and the last
    message of a stream wait for nothing.

    Args:
        cores: that this process may use; None finds out.
    """

    def __init__(self, cores: int | None = None) -> None:
        self._streams = 0
        self._share = min(CORES_SHARE * (cores or _cores()), LOOP_SHARE)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts one more stream within this."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @property
    def seconds(self) -> float:
        """Between two messages of a stream."""
        return min(self._streams * MESSAGE_SECONDS / self._share, LONGEST)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
