"""Profiles a command: each of its Python processes that uses jengine profiles itself from start to end."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.insight.profiling.capture import JAX, NOT_ASKED, PROFILE, Capture, read_profiles
from jengine.insight.profiling.data import Profile, ProfileOptions
from jengine.insight.profiling.heap import Heap
from jengine.insight.profiling.jax_capture import SECONDS, JaxCapture

VARIABLE = "_JENGINE_PROFILE"  # passes options as JSON, and the folder, to the command's processes
HOOK = Path(__file__).parent / "hook"
SERVER = "jengine.serving.app"
USES = ("jengine.engine.loop.engine", SERVER)  # processes that import one of these are profiled
LOOK_SECONDS = 0.1
WARM_STEPS = 20  # number of steps before the jax.profiler capture


class Instructions(msgspec.Struct):
    """Instructions for the command's processes."""

    folder: str
    options: ProfileOptions


def profile_command(command: list[str], options: ProfileOptions) -> tuple[Profile, bytes, int]:
    """Runs a command. Returns the profile of its processes, jax.profiler's capture as a zip file, and the
    exit code.

    Raises:
        InvalidArgument: it cannot be run, or none of its Python processes uses jengine.
    """
    if command[0] == "jengine":
        command = [sys.executable, "-m", "jengine.cli", *command[1:]]
    with tempfile.TemporaryDirectory() as folder:
        instructions = msgspec.json.encode(Instructions(folder, options)).decode()
        path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH", "")]))
        try:
            code = subprocess.call(command, env={**os.environ, VARIABLE: instructions, "PYTHONPATH": path})
        except OSError as error:
            raise InvalidArgument("command", command[0], f"cannot be run: {error.strerror}") from None
        profile, jax = read_profiles(" ".join(command), sorted(Path(folder).iterdir()))
    if not profile.processes:
        why = (
            f"ended with code {code}; nothing was profiled: no Python process (without -E and -I) used"
            " jengine's engine or server and exited normally"
        )
        raise InvalidArgument("command", " ".join(command)[:200], why)
    return profile, jax, code


def begin(instructions: str) -> None:
    """Called in a process of the command when it starts."""
    one = msgspec.json.decode(instructions, type=Instructions)
    OwnProfile(Path(one.folder) / str(os.getpid()), one.options)


class OwnProfile:
    """Profiles this process until it ends."""

    def __init__(self, folder: Path, options: ProfileOptions) -> None:
        self._folder, self._options = folder, options
        folder.mkdir()
        self._heap = Heap() if options.heap else None
        if self._heap is not None:
            self._heap.start()
            self._heap.first()
        self._capture = Capture("program", options, folder)
        self._jax = JaxCapture(folder / "jax")
        self._jax_asked = 0.0  # start time; -1: it has ended
        self._ended = threading.Event()
        self._registered = False
        self._lock = threading.Lock()
        atexit.register(self.finish)
        self._watcher = threading.Thread(target=self._watch, name="profile-watcher", daemon=True)
        started = threading.Thread(target=self._capture.start, name="profile-starter")
        started.start()
        started.join()
        self._watcher.start()

    def _watch(self) -> None:
        self._capture.hide()
        while not self._ended.wait(LOOK_SECONDS):
            with self._lock:
                if not self._ended.is_set():
                    self._check_records()

    def _check_records(self) -> None:
        self._capture.look()
        records = self._capture.records.values()
        # again: exit handlers run in reverse order, and this one must run before JAX's
        if records and not self._registered:
            self._registered = True
            atexit.register(self.finish)
        if not self._options.jax or self._jax_asked < 0.0:
            return
        if not self._jax_asked and any(len(one.steps) >= WARM_STEPS for one in records):
            self._jax_asked = time.perf_counter()
            self._jax.start()
        if self._jax_asked and time.perf_counter() >= self._jax_asked + SECONDS:
            self._end_jax()

    def _end_jax(self) -> None:
        begun = time.perf_counter()
        self._capture.profile.operations = self._jax.stop()
        self._capture.profile.disturbed.append((begun, time.perf_counter()))
        self._jax_asked = -1.0

    def finish(self) -> None:
        """Called at exit."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        profile = self._capture.stop()
        if profile.steps is not None:
            profile.name, steps = "engine", profile.steps.steps
            profile.busy = (steps[0].begun, steps[-1].ended) if steps else profile.busy
        else:
            profile.name = "server" if SERVER in sys.modules else Path(sys.argv[0]).name
        profile.command = " ".join(sys.argv)[:500]
        if self._jax_asked > 0.0:
            self._end_jax()
        if not self._options.jax:
            profile.missing["jax.profiler"] = NOT_ASKED
        elif self._jax.why or not self._jax_asked:
            profile.missing["jax.profiler"] = self._jax.why or f"no engine made {WARM_STEPS} steps"
        if self._heap is None:
            profile.missing["heap growth"] = NOT_ASKED
        else:
            profile.growth = self._heap.last()
            profile.heap_seconds = self._heap.seconds
        if any(name in sys.modules for name in USES):
            self._jax.pack(self._folder / JAX)
            (self._folder / PROFILE).write_bytes(msgspec.json.encode(profile))
