"""Facts about this process's threads from Linux's /proc. On other systems everything is unknown."""

from __future__ import annotations

import os
import platform
from pathlib import Path

UNKNOWN, RUNS = -2, -1  # special values for a system call's number
# System calls on files by number, as made by logging, caching and saving.
_NUMBERS = {
    "x86_64": {
        1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 8: "lseek", 18: "pwrite64", 20: "writev",
        73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink",
        217: "getdents64", 257: "openat", 262: "newfstatat", 277: "sync_file_range", 285: "fallocate",
        332: "statx",
    },
    "aarch64": {
        32: "flock", 46: "ftruncate", 47: "fallocate", 56: "openat", 57: "close", 62: "lseek", 64: "write",
        66: "writev", 79: "newfstatat", 80: "fstat", 82: "fsync", 83: "fdatasync", 291: "statx",
    },
}  # fmt: skip
FILES = frozenset(name for names in _NUMBERS.values() for name in names.values())


def file_call_name(number: int) -> str:
    """Name of a system call on files on this architecture; empty for others."""
    return _NUMBERS.get(platform.machine(), {}).get(number, "")


def call_now(thread: int) -> int:
    """Number of the system call that a thread of this process is in; RUNS if it is in none."""
    try:
        with open(f"/proc/self/task/{thread}/syscall", "rb") as file:
            first = file.read(64).split(b" ", 1)[0].strip()
    except OSError:
        return UNKNOWN
    return RUNS if first in (b"running", b"-1") else int(first)


def processor(thread: int) -> tuple[int, int]:
    """Nanoseconds that a thread of this process ran, and waited for a processor; (-1, -1): unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read(96).split()
    except (OSError, ValueError):
        return -1, -1
    return int(ran), int(waited)


def input_output(thread: int) -> dict[str, int]:
    """A thread's read and write calls, `syscr` and `syscw`, and their bytes; empty if unknown."""
    try:
        lines = Path(f"/proc/self/task/{thread}/io").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def thread_ids() -> list[int]:
    """Ids of this process's threads, Python's and others."""
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []
