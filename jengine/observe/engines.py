"""The engines of this process, for what looks at the process as a whole."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jengine.observe.step_recorder import StepRecorder  # brings jax


class Observed(Protocol):
    """An engine, as far as it is looked at here."""

    records: StepRecorder

    def memory_parts(self) -> dict[str, int]:
        """Bytes by what they are for."""

    @property
    def on_host(self) -> bool:
        """Whether these are in this process's memory."""


_engines: list[weakref.ref[Observed]] = []
_lock = threading.Lock()


def note_engine(engine: Observed) -> None:
    """Called by each as it is made."""
    with _lock:
        _engines[:] = [one for one in _engines if one() is not None]
        _engines.append(weakref.ref(engine))


def engines() -> list[Observed]:
    """Those that are still there, in the order in which they were made."""
    with _lock:
        return [engine for one in _engines if (engine := one()) is not None]
