"""A team of threads of our own: one call from XLA, computed by all cores.

XLA gives other threads work only where more than eight operations wait. Here a caller publishes a job, a function of (frame,
part, parts), takes parts of it as the workers do, and returns when all are done. Who finds the team busy with
another caller's job computes alone, so nobody ever waits for a turn; so does a process that was forked, which has no workers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import threading
from functools import cache
from pathlib import Path

from pallas_kernels.cpu import native

PAUSE = {"x86": "@llvm.x86.sse2.pause()", "aarch64": "@llvm.aarch64.isb(i32 15)"}  # of a thread that waits for another
PARTS = 8  # a thread: one that lost its core for a while leaves the rest to others
JOIN_S = 1.0

_lock = threading.RLock()
_limit: int | None = None
_workers: list[threading.Thread] = []
_pipe: list[int] = []  # that workers sleep in


def threads() -> int:
    """How many compute: a caller and the workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _limit or cores)


def parts() -> int:
    """Into how many parts kernels cut their work."""
    return 1 if threads() == 1 else PARTS * threads()


def limit(count: int | None) -> None:
    """Let at most this many threads compute, in all of the process; None: one a core."""
    global _limit
    if count is not None and count < 1:
        raise ValueError(f"count={count}: at least 1")
    with _lock:
        _limit = count
        if _workers and len(_workers) != threads() - 1:
            stop()
            runner()


def runner() -> int:
    """The address of void run(function, frame, parts), words of eight bytes; workers are made if there are none."""
    with _lock:
        if not _workers and threads() > 1:
            _start(threads() - 1)
        return _code()["run"]


def run(function: int, frame: int, parts: int) -> None:
    """Call what lies at an address for (frame, part, parts) of every part, on all threads."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(runner())(function, frame, parts)


def stop() -> None:
    """End the workers; callers compute alone until `runner` is asked for again."""
    with _lock:
        if _workers:
            ctypes.CFUNCTYPE(None)(_code()["stop"])()
            for worker in _workers:
                worker.join(JOIN_S)
            if not any(worker.is_alive() for worker in _workers):
                for end in _pipe:
                    os.close(end)
            _workers.clear()


@cache
def _code() -> dict[str, int]:
    """Addresses of the functions in team.ll."""
    names = "start", "forget", "stop", "run", "work"
    return dict(zip(names, native.compiled(source(native.host()), *names), strict=True))


def source(target: native.Target) -> str:
    """The module's text."""
    text = Path(__file__).with_suffix(".ll").read_text()
    pause = PAUSE.get(target.architecture)
    declared = f"declare void {re.sub(r'i32 [0-9]+', 'i32', pause)}\n" if pause else ""
    return text + declared + f"define internal void @pause() alwaysinline {{ {f'call void {pause} ' if pause else ''}ret void }}\n"


@cache
def _once() -> None:
    atexit.register(stop)  # threads that Python does not wait for would run on while it ends
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _start(count: int) -> None:
    _once()
    _pipe[:] = os.pipe()
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int, ctypes.c_int)(_code()["start"])(count, *_pipe)
    work = ctypes.CFUNCTYPE(None)(_code()["work"])  # without the lock of Python's interpreter
    _workers[:] = [threading.Thread(target=work, name=f"jengine-cpu-{n}", daemon=True) for n in range(count)]
    for worker in _workers:
        worker.start()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()
    _workers.clear()
    ctypes.CFUNCTYPE(None)(_code()["forget"])()
