"""Parts of this process's resident memory: weights, cache, programs, libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def resident_parts(parts: Mapping[str, int], on_devices: bool) -> dict[str, int]:
    """Resident bytes by part. "other" is the rest: Python's objects, XLA's buffers, stacks, memory kept by
    allocators.

    Args:
        parts: memory of engines, see `Engine.memory_parts`.
        on_devices: whether the parts are outside this process's memory.
    """
    resident = {} if on_devices else {part: size for part, size in parts.items() if size}
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return resident
    sizes = {name: 1024 * int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    resident["files: libraries, mapped weights"] = sizes["Rss"] - sizes["Anonymous"]
    resident["other"] = max(sizes["Rss"] - sum(resident.values()), 0)
    return resident
