"""Memory of this machine."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a container: its limit, and what it uses


def available_memory() -> int:
    """Bytes that can still be used, within a container's limit; a lot if this is not known."""
    found = [1 << 62]
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit, used = ((CGROUP / name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(limit) - int(used))
    except (OSError, ValueError):  # no container, or "max"
        pass
    return max(min(found), 0)
