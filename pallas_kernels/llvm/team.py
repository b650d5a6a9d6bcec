"""Runs one call from XLA on all cores: the caller and threads of XLA's pool share its parts.

XLA uses several threads for operations only if more than eight of them wait. So a caller publishes a job, a
function of (frame, part, parts), asks XLA's pool for helpers, and processes parts like them until none is
left. It waits only for helpers that have started. A caller that finds the team busy with another job computes
alone. Separate threads were slower: they compete with XLA's, which poll for work after each operation, and
steps took up to 1.5 times as long.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import cache
from pathlib import Path

from pallas_kernels.llvm import native

# instruction for a thread that waits for another
PAUSE = {"x86": "@llvm.x86.sse2.pause()", "aarch64": "@llvm.aarch64.isb(i32 15)"}
PARTS = 8  # per thread; if one loses its core for a while, others take the remaining parts

_lock = threading.Lock()


def threads() -> int:
    """Number of computing threads: a caller and its helpers. XLA's pool has one per core, or as many as NPROC
    says.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = os.environ.get("NPROC", "")
    return min(cores, int(pool) if pool.isdecimal() and int(pool) else cores)


def parts() -> int:
    """Number of parts into which kernels divide their work."""
    return 1 if threads() == 1 else PARTS * threads()


def runner() -> int:
    """Address of void run(function, frame, parts), with eight-byte words; frame is XLA's."""
    with _lock:
        code = _code()
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(code["limit"])(threads() - 1)
        return code["run"]


def source(target: native.Target) -> str:
    """The module's source."""
    text = Path(__file__).with_suffix(".ll").read_text()
    pause = PAUSE.get(target.architecture)
    declared = f"declare void {re.sub(r'i32 [0-9]+', 'i32', pause)}\n" if pause else ""
    return (
        text
        + declared
        + f"define internal void @pause() alwaysinline {{ {f'call void {pause} ' if pause else ''}ret void"
        " }\n"
    )


@cache
def _code() -> dict[str, int]:
    """Addresses of the functions in team.ll."""
    names = "limit", "forget", "run"
    code = dict(zip(names, native.compiled(lambda: source(native.host()), *names, name="team"), strict=True))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=ctypes.CFUNCTYPE(None)(code["forget"]))
    return code
