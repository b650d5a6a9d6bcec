"""Profiles this process."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
import tracemalloc
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.insight.profiling.data import CallCount, HeapGrowth, ProcessProfile, Profile, ProfileOptions
from jengine.insight.profiling.device_trace import device_times, operations_of
from jengine.insight.profiling.sampler import ThreadSampler
from jengine.insight.recording.engines import engines
from jengine.insight.recording.machine import garbage_pauses
from jengine.insight.recording.trace import Trace

if TYPE_CHECKING:
    from jengine.insight.recording.trace import Readers

PROFILE, JAX = "profile.json", "jax.zip"  # files that a capture writes
NOT_ASKED = "it was not requested"
HEAP_LINES = 20
SETTLE = 0.2  # share of the time before the heap's first snapshot, so that both have temporary allocations
OTHERS = [tracemalloc.Filter(False, tracemalloc.__file__), tracemalloc.Filter(False, __file__)]
JAX_BYTES = 256 << 20  # maximum size of jax.profiler's capture
JAX_SECONDS = 2.0  # maximum duration: writing it takes about as long again, and blocks the process
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
    file. readers: for a server, see Trace.
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
        trace, why = jax_trace(Path(scratch), lambda: wait(min(options.seconds, JAX_SECONDS)))
        if trace:
            profile.operations, profile.device_times = operations_of(trace), device_times(trace)
        why = why or _pack(Path(scratch), folder / JAX)
    if why:
        profile.missing["jax.profiler"] = why


def heap_growth(seconds: float, wait: Callable[[float], object]) -> tuple[list[HeapGrowth], float]:
    """Lines that have grown in this period, the largest first, and the seconds between the snapshots. Slows
    allocations, and sees only those made meanwhile, unless tracemalloc is already on.
    """
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start(1)
    try:
        wait(SETTLE * seconds)
        before, begun = tracemalloc.take_snapshot(), time.perf_counter()
        wait((1.0 - SETTLE) * seconds)
        after, elapsed = tracemalloc.take_snapshot(), time.perf_counter() - begun
    finally:
        if not tracing:
            tracemalloc.stop()
    grown = after.filter_traces(OTHERS).compare_to(before.filter_traces(OTHERS), "lineno")
    lines = [line for line in grown if line.size_diff > 0][:HEAP_LINES]
    return [HeapGrowth(_place(line.traceback[0]), line.size_diff, line.count_diff) for line in lines], elapsed


def _place(frame: tracemalloc.Frame) -> str:
    return "/".join(frame.filename.split("/")[-3:]) + f":{frame.lineno}"


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


def kernel_counts() -> dict[int, dict[str, int]]:
    """Read and write calls so far, `syscr` and `syscw`, and their bytes, by the system's id of each thread of
    this process, Python's and others; empty for a thread if unknown.
    """
    counts = dict[int, dict[str, int]]()
    for thread in Path("/proc/self/task").glob("*"):
        counts[int(thread.name)] = {}
        with suppress(OSError):
            lines = [line.split(": ") for line in (thread / "io").read_text().splitlines()]
            counts[int(thread.name)] = {name: int(value) for name, value in lines}
    return counts


def add_calls(profile: ProcessProfile, sampler: ThreadSampler, before: dict[int, dict[str, int]]) -> None:
    """Adds the calls since `before`, an earlier result of `kernel_counts`, to the profile."""
    threads, frames = sampler.names(), _usual_frames(sampler)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for (thread, name, _), count in sampler.calls.items():
        seconds[thread, name] += count * sampler.interval
    for number, now in kernel_counts().items():
        if number in sampler.own:
            continue
        if not now:
            profile.missing["counts of system calls"] = "/proc/self/task/*/io is missing"
        thread = threads.get(number, f"thread {number}")
        for key, name in (("syscr", "read"), ("syscw", "write")):
            if count := now.get(key, 0) - before.get(number, {}).get(key, 0):
                where, spent = frames.get((thread, name), ""), seconds.pop((thread, name), 0.0)
                profile.calls.append(CallCount(thread, name, count, spent, where))
    profile.calls += [CallCount(*key, -1, spent, frames.get(key, "")) for key, spent in seconds.items()]
    if sampler.knows_calls:
        profile.slow_calls += sampler.slow_calls
    else:
        profile.missing["slow system calls"] = "/proc/self/task/*/syscall cannot be read"


def _usual_frames(sampler: ThreadSampler) -> dict[tuple[str, str], str]:
    """For each thread and call on files, the frame in most of its samples."""
    samples = [*reversed(sampler.calls_at.most_common()), *reversed(sampler.calls.most_common())]
    return {(thread, call): where for (thread, call, where), _ in samples}


def jax_trace(folder: Path, work: Callable[[], object]) -> tuple[dict[str, Any], str]:
    """Captures with jax.profiler while the work runs, into a folder for XProf. JAX allows one capture at a
    time.

    Returns:
        The events in Chrome's format, and the reason why there is no capture; empty if there is one.
    """
    jax: Any = sys.modules.get("jax")
    if jax is None or not jax._src.xla_bridge.backends_are_initialized():
        return {}, "this process does not use JAX"
    options = jax.profiler.ProfileOptions()
    # Python calls are sampled separately; level 1 includes the programs' own events
    options.python_tracer_level, options.host_tracer_level = 0, 1
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except RuntimeError as error:  # another capture is running
        return {}, str(error)
    try:
        work()
    finally:
        jax.profiler.stop_trace()
    files = sorted(folder.rglob("*.trace.json.gz"))
    return json.loads(gzip.decompress(files[-1].read_bytes())) if files else {}, ""


def _pack(folder: Path, to: Path) -> str:
    """Writes a capture to a zip file, if there is one. Returns the reason if it is too large."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if size > JAX_BYTES:
        return f"the capture has {size >> 20} MiB; the limit is {JAX_BYTES >> 20}"
    if files:
        with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as packed:
            for file in files:
                packed.write(file, file.relative_to(folder))
    return ""
