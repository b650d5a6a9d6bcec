"""A capture by jax.profiler: a folder for XProf, and a list of the most expensive operations."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

MOST = 25  # maximum number of listed operations
MAX_BYTES = 256 << 20  # maximum size of a capture
SECONDS = 2.0  # maximum duration: writing it takes about as long again, and blocks the process


class JaxCapture:
    """Captures from `start` until `stop`. JAX allows one capture at a time.

    Attributes:
        why: the reason why there is no capture; empty if there is one.
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
        # Python calls are sampled separately; level 1 includes the programs' own events
        options.python_tracer_level, options.host_tracer_level = 0, 1
        try:
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._started = True
        except RuntimeError as error:  # another capture is running
            self.why = str(error)

    def stop(self) -> list[tuple[str, int, float]]:
        """(name, count, seconds) of the most expensive operations, over all threads and devices."""
        if not self._started:
            return []
        self._started = False
        jax: Any = sys.modules["jax"]
        jax.profiler.stop_trace()
        found = sorted(self._folder.rglob("*.trace.json.gz"))
        return longest_operations(json.loads(gzip.decompress(found[-1].read_bytes()))) if found else []

    def pack(self, to: Path) -> bool:
        """Writes the capture to a zip file. Returns False if there is none, or it is too large; see `why`."""
        files = [file for file in self._folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        if not files or size > MAX_BYTES:
            self.why = (
                self.why or f"the capture has {size >> 20} MiB; the limit is {MAX_BYTES >> 20}"
                if files
                else self.why
            )
            return False
        with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in files:
                packed.write(file, file.relative_to(self._folder))
        return True


def longest_operations(trace: dict[str, Any]) -> list[tuple[str, int, float]]:
    """From a capture's events in Chrome's format."""
    counts: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for event in trace.get("traceEvents", ()):
        if event.get("ph") == "X":
            counts[event["name"]] += 1
            seconds[event["name"]] += 1e-6 * event.get("dur", 0.0)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:MOST]
    return [(name[:120], counts[name], seconds[name]) for name in longest]
