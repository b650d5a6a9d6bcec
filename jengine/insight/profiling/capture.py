"""Profiles this process."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.insight.profiling import heap
from jengine.insight.profiling.counters import Counters
from jengine.insight.profiling.data import ProcessProfile, Profile, ProfileOptions
from jengine.insight.profiling.garbage import Collections
from jengine.insight.profiling.jax_capture import SECONDS, JaxCapture
from jengine.insight.profiling.py_spy import PySpy
from jengine.insight.profiling.resident import resident_parts
from jengine.insight.profiling.sampler import ThreadSampler
from jengine.insight.profiling.system_calls import SystemCalls
from jengine.insight.recording.engines import engines

if TYPE_CHECKING:  # a process that profiles itself from its start has imported little
    from jengine.insight.recording.step_recorder import StepRecorder
    from jengine.insight.recording.trace import Readers

PROFILE, JAX = "profile.json", "jax.zip"  # files that a capture writes
PARTS_SECONDS = 2.0  # interval at which an engine's memory is sampled
NOT_ASKED = "it was not requested"
_one = threading.Lock()


class Capture:
    """Timings of this process from `start` until `stop`: stacks, waits, garbage collections, system calls,
    counters.

    Args:
        name: see ProcessProfile.
        folder: for output files of tools.

    Attributes:
        records: records of the engines that were seen.

    Raises:
        InvalidArgument: this process is already being profiled.
    """

    def __init__(self, name: str, options: ProfileOptions, folder: Path) -> None:
        if not _one.acquire(blocking=False):
            raise InvalidArgument("profile", name, "this process is already being profiled")
        self.profile = ProcessProfile(name=name, pid=os.getpid(), command=" ".join(sys.argv)[:500], begun=0.0)
        self.records: dict[int, StepRecorder] = {}
        self._parts: dict[int, dict[str, int]] = {}
        self._measured: dict[int, float] = {}  # time of the last memory sample
        self._on_host = True
        self._loops: dict[str, None] = {}
        self._sampler = ThreadSampler(options.rate)
        self._collections = Collections()
        self._py_spy = PySpy(options.rate, folder)
        self._calls = SystemCalls(options.system_calls, folder)
        self._counters = Counters(folder)

    def start(self) -> None:
        """Starts, in a thread that belongs to the profiler and is left out of the profile."""
        self._py_spy.start()
        self._calls.start()
        self._counters.start()
        self.profile.begun, self.profile.unix = time.perf_counter(), time.time()
        self._collections.start()
        self._sampler.start()

    def hide(self) -> None:
        """Leaves this thread out of the profile."""
        self._sampler.hide()

    def look(self) -> None:
        """Samples the current engines. Their data is kept after they end."""
        names, now = {thread.ident: thread.name for thread in threading.enumerate()}, time.perf_counter()
        for engine in engines():
            self.records[id(engine.records)] = engine.records
            if now >= self._measured.get(id(engine.records), 0.0) + PARTS_SECONDS:
                self._measured[id(engine.records)], self._parts[id(engine.records)] = (
                    now,
                    engine.memory_parts(),
                )
            self._on_host = self._on_host and engine.on_host
            if name := names.get(engine.records.thread):
                self._loops[name] = None

    def stop(self) -> ProcessProfile:
        """Ends the capture. The result includes the step records of its period."""
        profile, sampler = self.profile, self._sampler
        profile.ended = time.perf_counter()
        profile.busy = profile.begun, profile.ended
        self._collections.stop()
        sampler.stop()
        self._counters.stop(profile)
        self._calls.stop(profile, sampler, sampler.names())
        profile.samples, profile.late = sampler.samples, sampler.late
        profile.lock_waits, profile.interpreter_waits = [*sampler.lock_waits], [*sampler.interpreter_waits]
        profile.collections, profile.pauses = self._collections.listed, self._collections.pauses
        if not sampler.knows_run_queue:
            profile.missing["waiting for a processor"] = (
                "/proc/self/task/*/schedstat is missing: this time counts as waiting for the interpreter"
            )
        flames = self._py_spy.stop(sampler.own_names)
        profile.sampler = "py-spy" if flames else "samples of sys._current_frames"
        profile.flames = flames or sampler.flames()
        if self._py_spy.why:
            profile.missing["py-spy"] = self._py_spy.why
        self.look()
        self._of_engines(profile)
        return profile

    def close(self) -> None:
        """Allows the next profile."""
        _one.release()

    def _of_engines(self, profile: ProcessProfile) -> None:
        """Adds the steps of the engine that stepped last, its memory by part, and the stepping threads."""
        profile.important = [*dict.fromkeys([*self._loops, threading.main_thread().name])]
        parts: dict[str, int] = {}
        for one in self._parts.values():
            for part, size in one.items():
                parts[part] = parts.get(part, 0) + size
        profile.memory = resident_parts(parts, on_devices=not self._on_host)
        profile.device = {} if self._on_host else parts
        stepped = [records for records in self.records.values() if records.steps]
        if stepped:
            records = max(stepped, key=lambda records: records.steps[-1].ended)
            profile.trace = records.trace(time.perf_counter() - profile.begun + 1.0).to_json()


def capture_process(
    name: str, options: ProfileOptions, folder: Path, wait: Callable[[float], object] = time.sleep
) -> None:
    """Profiles this process and writes the files PROFILE and JAX to the folder.

    Timings come first, then what would disturb them: jax.profiler's capture and the heap. Blocks, so requests
    must not need the calling thread.

    Args:
        wait: called with seconds to wait; may return earlier.

    Raises:
        InvalidArgument: this process is already being profiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        capture = Capture(name, options, Path(scratch))
        try:
            capture.start()
            wait(options.seconds)
            profile = capture.stop()
            _capture_jax(profile, options, folder, Path(scratch), wait)
            if options.heap:
                profile.growth, profile.heap_seconds = heap.measure(options.heap_seconds, wait)
            else:
                profile.missing["heap growth"] = NOT_ASKED
        finally:
            capture.close()
    (folder / PROFILE).write_bytes(msgspec.json.encode(profile))


def read_profiles(
    target: str, folders: Iterable[Path], readers: Readers | None = None
) -> tuple[Profile, bytes]:
    """Reads the files that captures wrote to these folders: the profile, and jax.profiler's capture as a zip
    file.

    Args:
        readers: for a server, see Trace.
    """
    processes, jax = [], b""
    for folder in folders:
        if not (folder / PROFILE).is_file():
            continue
        process = msgspec.json.decode((folder / PROFILE).read_bytes(), type=ProcessProfile)
        if process.trace and readers is not None:
            from jengine.insight.recording.trace import Trace

            trace = Trace.from_json(process.trace)
            trace.readers = readers
            process.trace = trace.to_json()
        processes.append(process)
        if not jax and (folder / JAX).is_file():
            jax = (folder / JAX).read_bytes()
    return Profile(target=target, processes=sorted(processes, key=lambda process: not process.trace)), jax


def _capture_jax(
    profile: ProcessProfile,
    options: ProfileOptions,
    folder: Path,
    scratch: Path,
    wait: Callable[[float], object],
) -> None:
    """Captures with jax.profiler for some seconds, into the folder."""
    if not options.jax:
        profile.missing["jax.profiler"] = NOT_ASKED
        return
    capture = JaxCapture(scratch / "jax")
    capture.start()
    if not capture.why:
        wait(min(options.seconds, SECONDS))
    profile.operations = capture.stop()
    capture.pack(folder / JAX)
    if capture.why:
        profile.missing["jax.profiler"] = capture.why
