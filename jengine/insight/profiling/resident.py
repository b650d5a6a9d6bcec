"""Parts of this process's resident memory: weights, cache, programs, Python objects, libraries."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

ARENAS = re.compile(r"# bytes in allocated blocks\s*=\s*([\d,]+)")


def resident_parts(parts: Mapping[str, int], on_devices: bool) -> dict[str, int]:
    """Resident bytes by part. "other" is the rest: XLA's buffers, stacks, large Python objects, memory kept
    by allocators.

    Args:
        parts: memory of engines, see `Engine.memory_parts`.
        on_devices: whether the parts are outside this process's memory.
    """
    found = {} if on_devices else {part: size for part, size in parts.items() if size}
    if objects := python_objects():
        found["Python's objects up to 512 bytes"] = objects
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return found
    sizes = {name: 1024 * int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    found["files: libraries, mapped weights"] = sizes["Rss"] - sizes["Anonymous"]
    found["other"] = max(sizes["Rss"] - sum(found.values()), 0)
    return found


def python_objects() -> int:
    """Bytes in blocks of Python's allocator, which holds objects of up to 512 bytes; 0 if unknown.

    No public function returns these statistics as numbers, so they are parsed from the allocator's report.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        report = ctypes.pythonapi._PyObject_DebugMallocStats
        libc = ctypes.CDLL(None)
        libc.open_memstream.restype = ctypes.c_void_p
        text, size = ctypes.c_char_p(), ctypes.c_size_t()
        stream = libc.open_memstream(ctypes.byref(text), ctypes.byref(size))
        try:
            report(ctypes.c_void_p(stream))
        finally:
            libc.fclose(ctypes.c_void_p(stream))
        found = ARENAS.search((text.value or b"").decode())
        libc.free(text)
        return int(found[1].replace(",", "")) if found else 0
    return 0
