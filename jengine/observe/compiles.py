"""Counts XLA compilations of the whole process: after warm-up, one is a bug."""

from __future__ import annotations

import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

_lock = threading.Lock()
_count = 0
_listening = False


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == COMPILE_EVENT:
        with _lock:
            _count += 1


def compile_count() -> int:
    """Compilations of any jitted function in this process since the first call of this function."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_heard)
            _listening = True
        return _count
