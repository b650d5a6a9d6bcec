"""Counts XLA compilations of this process. After warm-up, each one that was not announced is a bug."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

# also recorded when JAX's persistent cache supplied the result
COMPILED = "/jax/core/compile/backend_compile_duration"
RETRIEVED = "/jax/compilation_cache/cache_retrieval_time_sec"

_lock = threading.Lock()
_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_counts = {COMPILED: 0, RETRIEVED: 0}
_of_engines = 0
_seconds = {COMPILED: 0.0, RETRIEVED: 0.0}
_listening = False
_thread = threading.local()


@contextmanager
def announced() -> Iterator[None]:
    """Compilations of this thread in this context are expected (programs of the table) and not counted."""
    _thread.announced = True
    try:
        yield
    finally:
        _thread.announced = False


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    global _of_engines
    if event in _counts and not (event == COMPILED and getattr(_thread, "announced", False)):
        ours = event == COMPILED and _called_here()
        with _lock:
            _counts[event] += 1
            _seconds[event] += duration_secs
            _of_engines += ours


def _called_here() -> bool:
    """Whether code of this package compiles, and not a caller's own function."""
    frame = sys._getframe(2)  # of JAX
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _count(event: str) -> int:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_heard)
            _listening = True
        return _counts[event]


def compile_count() -> int:
    """Compilations of any jitted function in this process, without announced ones.

    Counting begins with the first call of a function in this module.
    """
    return _count(COMPILED)


def engine_compile_count() -> int:
    """Number of these in calls of this package. Others are of the caller's own functions."""
    _count(COMPILED)
    return _of_engines


def retrieval_count() -> int:
    """Number of these that JAX's persistent compilation cache answered."""
    return _count(RETRIEVED)


def compile_seconds() -> float:
    """Total seconds of the compilations in `compile_count`."""
    return _seconds[COMPILED]
