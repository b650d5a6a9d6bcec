"""Limits how often streams write, so that under load several tokens share a message."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jengine.spi import Readers

MESSAGE_SECONDS = 100e-6  # the event loop's time for a message
# share of all cores' time for the messages of all streams, since the engine may need the cores
CORES_SHARE = 0.04
LOOP_SHARE = 0.5  # maximum share of the event loop's time
LONGEST = 0.1  # seconds
WAITING = 0.5  # seconds after which a write counts as waiting for its client


class Pace:
    """Bounds the share of CPU time used by streams.

    A message costs the server and its client much more than a token in it. With few streams, each token is
    sent immediately. With many, a stream waits between two messages, and tokens that arrive meanwhile are
    sent together. The first and the last message of a stream are never delayed. All streams wait for the same
    beats, since messages written together wake the server's and the client's processes once, not once each.

    Args:
        cores: number of cores that this process may use; None: detected.

    Attributes:
        writing: streams that are writing a message, with the start times (time.monotonic()).
    """

    def __init__(self, cores: int | None = None) -> None:
        self._streams, self._beat = 0, 0.0
        self.writing: dict[object, float] = {}
        self._share = min(CORES_SHARE * (cores or _cores()), LOOP_SHARE)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A context that counts one more stream."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    def readers(self) -> Readers:
        """How clients currently read."""
        now = time.monotonic()
        waits = [now - since for since in self.writing.values() if now - since >= WAITING]
        return Readers(streams=self._streams, waiting=len(waits), longest=max(waits, default=0.0))

    def next_beat(self, now: float) -> float:
        """When a stream that writes now may write again, on the clock of time.monotonic()."""
        if now >= self._beat:
            self._beat = now + self.seconds
        return self._beat

    @property
    def seconds(self) -> float:
        """Seconds between two beats."""
        return min(self._streams * MESSAGE_SECONDS / self._share, LONGEST)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
