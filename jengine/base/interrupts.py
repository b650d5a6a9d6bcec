"""Delays Ctrl-C until a change of shared state is complete."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class uninterrupted:
    """Delay SIGINT until the block has ended, then handle it as usual: by default with a KeyboardInterrupt.

    Python handles signals in the main thread only, so this does nothing in others.
    """

    __slots__ = ("_before", "_held")

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        before = (
            signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        )
        # otherwise the system's default: ignored, or the process ends
        self._before = before if callable(before) else None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._defer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._held is not None:
                self._before(*self._held)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
