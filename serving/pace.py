"""How often streams write, so that under load tokens gather in fewer messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MESSAGE_SECONDS = 100e-6  # of the event loop's time, that a message takes
SHARE = 0.25  # of that time, for all streams together
LONGEST = 0.1  # seconds


class Pace:
    """Bounds the share of the event loop's time that streams take.

    A message costs the server's process and its client much more than a token in it does. With few streams each token goes out as it
    comes; with many, a stream waits between two messages, and the tokens that come meanwhile go out together. The first and the last
    message of a stream wait for nothing.
    """

    def __init__(self) -> None:
        self._streams = 0

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
        return min(self._streams * MESSAGE_SECONDS / SHARE, LONGEST)
