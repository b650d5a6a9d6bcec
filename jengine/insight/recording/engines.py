"""The engines of this process, for observing the process as a whole."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jengine.insight.recording.step_recorder import StepRecorder  # imports jax


class Observed(Protocol):
    """The interface of an observed engine."""

    records: StepRecorder

    def memory_parts(self) -> dict[str, int]:
        """Bytes by use."""

    @property
    def on_host(self) -> bool:
        """Whether this memory is part of the process's host memory."""


_engines: weakref.WeakValueDictionary[int, Observed] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def note_engine(engine: Observed) -> None:
    """Registers a new engine."""
    with _lock:
        _engines[id(engine)] = engine


def engines() -> list[Observed]:
    """Existing engines, in order of creation."""
    with _lock:
        return [*_engines.values()]
