"""Facts about this process's threads from Linux's /proc. On other systems everything is unknown."""

from __future__ import annotations

import os
import platform
from pathlib import Path

UNKNOWN, RUNS = -2, -1  # special values for a system call's number
# System calls on files, as made by logging, caching and saving.
FILES = frozenset([
    "write", "pwrite64", "writev", "pwritev", "fsync", "fdatasync", "sync_file_range", "open", "openat",
    "close", "stat", "fstat", "lstat", "newfstatat", "statx", "lseek", "rename", "renameat", "renameat2",
    "unlink", "unlinkat", "mkdir", "mkdirat", "ftruncate", "truncate", "flock", "fallocate", "msync",
    "sendfile", "copy_file_range", "getdents64",
])  # fmt: skip
_X86_64 = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 7: "poll", 8: "lseek", 9: "mmap",
    10: "mprotect", 11: "munmap", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev", 23: "select",
    24: "sched_yield", 28: "madvise", 35: "nanosleep", 43: "accept", 44: "sendto", 45: "recvfrom",
    46: "sendmsg", 47: "recvmsg", 61: "wait4", 73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
    82: "rename", 83: "mkdir", 87: "unlink", 202: "futex", 217: "getdents64", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
    277: "sync_file_range", 281: "epoll_pwait", 285: "fallocate", 288: "accept4", 332: "statx",
}  # fmt: skip
_ARM64 = {
    22: "epoll_pwait", 32: "flock", 46: "ftruncate", 47: "fallocate", 56: "openat", 57: "close", 62: "lseek",
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 72: "pselect6",
    73: "ppoll", 79: "newfstatat", 80: "fstat", 82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex",
    101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 206: "sendto", 207: "recvfrom",
    211: "sendmsg", 212: "recvmsg", 215: "munmap", 222: "mmap", 226: "mprotect", 233: "madvise", 260: "wait4",
    291: "statx",
}  # fmt: skip
_NAMES = {"x86_64": _X86_64, "aarch64": _ARM64}.get(platform.machine(), {})


def call_name(number: int) -> str:
    """Name of a system call on this architecture."""
    return _NAMES.get(number, f"system call {number}")


def call_now(thread: int) -> int:
    """Number of the system call that a thread of this process is in; RUNS if it is in none."""
    try:
        with open(f"/proc/self/task/{thread}/syscall", "rb") as file:
            first = file.read(64).split(b" ", 1)[0].strip()
    except OSError:
        return UNKNOWN
    return RUNS if first in (b"running", b"-1") else int(first)


def processor(thread: int) -> tuple[int, int]:
    """Nanoseconds for which a thread of this process had a processor, and waited for one; (-1, -1) if
    unknown.
    """
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read(96).split()
    except (OSError, ValueError):
        return -1, -1
    return int(ran), int(waited)


def input_output(thread: int) -> dict[str, int]:
    """Read and write calls of a thread of this process, as `syscr` and `syscw`, and their bytes; empty if
    unknown.
    """
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
