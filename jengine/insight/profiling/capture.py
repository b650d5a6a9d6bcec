"""Profiles this process."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.insight.profiling.data import ProcessProfile, Profile, ProfileOptions
from jengine.insight.profiling.heap import heap_growth
from jengine.insight.profiling.jax_capture import SECONDS, JaxCapture
from jengine.insight.profiling.resident import resident_parts
from jengine.insight.profiling.sampler import ThreadSampler
from jengine.insight.profiling.system_calls import add_calls, kernel_counts
from jengine.insight.recording.engines import engines
from jengine.insight.recording.pauses import garbage_pauses
from jengine.insight.recording.trace import Trace

if TYPE_CHECKING:
    from jengine.insight.recording.trace import Readers

PROFILE, JAX = "profile.json", "jax.zip"  # files that a capture writes
NOT_ASKED = "it was not requested"
Wait = Callable[[float], object]
_lock = threading.Lock()


def capture_process(name: str, options: ProfileOptions, folder: Path, wait: Wait = time.sleep) -> None:
    """Profiles this process and writes the files PROFILE and JAX to the folder.

    Timings come first, then what would disturb them: jax.profiler's capture and the heap. Blocks, so requests
    must not need the calling thread.

    Args:
        wait: called with seconds to wait; may return earlier.

    Raises:
        InvalidArgument: this process is already being profiled.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not _lock.acquire(blocking=False):
        raise InvalidArgument("profile", name, "this process is already being profiled")
    try:
        profile = _timings(name, options, wait)
        if options.jax:
            _capture_jax(profile, options, folder, wait)
        else:
            profile.missing["jax.profiler"] = NOT_ASKED
        if options.heap:
            profile.growth, profile.heap_seconds = heap_growth(options.heap_seconds, wait)
        else:
            profile.missing["heap growth"] = NOT_ASKED
    finally:
        _lock.release()
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
            trace = Trace.from_json(process.trace)
            trace.readers = readers
            process.trace = trace.to_json()
        processes.append(process)
        if not jax and (folder / JAX).is_file():
            jax = (folder / JAX).read_bytes()
    return Profile(target=target, processes=sorted(processes, key=lambda process: not process.trace)), jax


def _timings(name: str, options: ProfileOptions, wait: Wait) -> ProcessProfile:
    """Stacks, waits, garbage collections, system calls and counters, and the step records of that time."""
    sampler, pauses, calls, usage = ThreadSampler(options.rate), garbage_pauses(), kernel_counts(), _usage()
    profile = ProcessProfile(
        name=name,
        pid=os.getpid(),
        command=" ".join(sys.argv)[:500],
        begun=time.perf_counter(),
        unix=time.time(),
    )
    collected = pauses.by_generation
    sampler.start()
    try:
        wait(options.seconds)
    finally:
        profile.ended = time.perf_counter()
        sampler.stop()
    profile.samples, profile.late, profile.flames = sampler.samples, sampler.late, sampler.flames()
    profile.lock_waits, profile.interpreter_waits = [*sampler.lock_waits], [*sampler.interpreter_waits]
    profile.collections = [pause for pause in pauses.longest if pause.begun >= profile.begun]
    profile.pauses = [
        (count - before, seconds - earlier)
        for (count, seconds), (before, earlier) in zip(pauses.by_generation, collected, strict=True)
    ]
    profile.counters = {counter: value - usage[counter] for counter, value in _usage().items()}
    if options.system_calls == "off":
        profile.missing["system calls"] = NOT_ASKED
    else:
        add_calls(profile, sampler, calls)
    if not sampler.knows_run_queue:
        profile.missing["waiting for a processor"] = (
            "/proc/self/task/*/schedstat is missing: this time counts as waiting for the interpreter"
        )
    _add_engines(profile)
    return profile


def _usage() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "processor seconds, user": usage.ru_utime,
        "processor seconds, system": usage.ru_stime,
        "voluntary switches": float(usage.ru_nvcsw),
        "involuntary switches": float(usage.ru_nivcsw),
        "page faults": float(usage.ru_minflt + usage.ru_majflt),
    }


def _add_engines(profile: ProcessProfile) -> None:
    """Adds the steps of the engine that stepped last, its memory by part, and the stepping threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running, on_host = engines(), True
    loops = [name for engine in running if (name := names.get(engine.records.thread))]
    profile.important = [*dict.fromkeys([*loops, threading.main_thread().name])]
    parts: dict[str, int] = {}
    for engine in running:
        on_host = on_host and engine.on_host
        for part, size in engine.memory_parts().items():
            parts[part] = parts.get(part, 0) + size
    profile.memory = resident_parts(parts, on_devices=not on_host)
    profile.device = {} if on_host else parts
    if stepped := [engine.records for engine in running if engine.records.steps]:
        records = max(stepped, key=lambda records: records.steps[-1].ended)
        profile.trace = records.trace(time.perf_counter() - profile.begun + 1.0).to_json()


def _capture_jax(profile: ProcessProfile, options: ProfileOptions, folder: Path, wait: Wait) -> None:
    """Captures with jax.profiler for some seconds, into the folder."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        capture = JaxCapture(Path(scratch))
        capture.start()
        if not capture.why:
            wait(min(options.seconds, SECONDS))
        profile.operations = capture.stop()
        capture.pack(folder / JAX)
    if capture.why:
        profile.missing["jax.profiler"] = capture.why
