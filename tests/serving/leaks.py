"""Resources of a process, counted before and after."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def held() -> Counter[str]:
    """File descriptors, threads (except those of executors, which stay), and child processes, including
    zombies.
    """
    threads = (thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_"))
    children = (f"process {child}" for task in Path("/proc/self/task").iterdir() for child in _children(task))
    return Counter({"descriptors": len(os.listdir("/proc/self/fd")), **Counter(threads), **Counter(children)})


@contextmanager
def nothing_leaks() -> Iterator[None]:
    before = held()
    yield
    # what another test left may end meanwhile
    wait_until(lambda: held() <= before, lambda: f"left behind: {held() - before}")


def wait_until(condition, message=lambda: "") -> None:  # type: ignore[no-untyped-def]
    """Waits for work in other threads and processes to finish."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, message()
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _children(task: Path) -> list[str]:
    """Children of a thread, which may have ended."""
    try:
        return (task / "children").read_text().split()
    except FileNotFoundError:
        return []
