"""What jax.profiler captures, as a folder for XProf and a list of the operations that took longest."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

MOST = 25  # operations that are listed
MAX_BYTES = 256 << 20  # of a capture that is kept
SECONDS = 2.0  # of a capture at most: it takes about as long again to write down, and the process waits


class JaxCapture:
    """Captures from `start` until `stop`. JAX allows one capture at a time.

    Attributes:
        why: there is none; empty where there is one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = False
        self.why = ""

    def start(self) -> None:
        jax: Any = sys.modules.get("jax")
        if jax is None or not jax._src.xla_bridge.backends_are_initialized():
            self.why = "this process does not use JAX"
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level, options.host_tracer_level = 0, 1  # Python's calls are sampled; level 1 has the programs' own events
        try:
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._started = True
        except RuntimeError as error:  # another one runs
            self.why = str(error)

    def stop(self) -> list[tuple[str, int, float]]:
        """(name, count, seconds) of the operations that took longest, in all threads and on all devices."""
        if not self._started:
            return []
        self._started = False
        jax: Any = sys.modules["jax"]
        jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("*.trace.json.gz"))
        return longest_operations(json.loads(gzip.decompress(found[-1].read_bytes()))) if found else []

    def pack(self, to: Path) -> bool:
        """Write a zip file of the capture; False where there is none, or `why` says that it is too large."""
        files = [file for file in self._folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        if not files or size > MAX_BYTES:
            self.why = self.why or f"the capture takes {size >> 20} MiB, and at most {MAX_BYTES >> 20} are kept" if files else self.why
            return False
        with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in files:
                packed.write(file, file.relative_to(self._folder))
        return True


def longest_operations(trace: dict[str, Any]) -> list[tuple[str, int, float]]:
    """Of a capture's events in Chrome's format."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X":
            counts[event["name"]] += 1
            seconds[event["name"]] += 1e-6 * event.get("dur", 0.0)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:MOST]
    return [(name[:120], counts[name], seconds[name]) for name in longest]
