"""Processes that compile programs in place of the engine's process: lowering and saving a program hold
Python's lock, and a step would wait for it.

They have no GPU: they compile for a description of it. Each takes one program at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jengine.devices.device_defaults import CORES
from jengine.execution.cache_folders import folder_name
from jengine.execution.kinds import Key
from jengine.execution.memory import ProgramMemory
from jengine.execution.program_store import difference
from jengine.execution.spec import JAX_OPTIONS, ExecutionSpec
from pallas_kernels.compilation import ahead_of_time

log = logging.getLogger("jengine")
MODULE = "jengine.execution.compile_child"
READY = b"ready"
PATIENCE = 300.0  # seconds until a process is ready, on a busy machine
NICENESS = 5  # added to this process's, while the engine starts
GRACE = 1.0  # seconds until a process that has closed its socket ends
MEMORY = 1 << 30  # bytes that a process needs
ENDED = "the processes that compile have ended"
LINES = 3  # of what a process wrote before it ended, for the log


@dataclass(frozen=True, slots=True)
class Target:
    """GPUs of one host to compile for, which the compiling process does not touch.

    Attributes:
        memory: see `ahead_of_time.devices`.
    """

    name: str
    count: int
    memory: int

    def devices(self) -> list[jax.Device]:
        return ahead_of_time.devices(self.name, self.count, self.memory)

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> Target | None:
        """Describe GPUs that are present; None: programs for them cannot be compiled without them."""
        name = ahead_of_time.target_of(devices[0])
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if name is None or limit is None:
            return None
        return cls(name, 1 + max(device.id for device in devices), limit)


class Job(NamedTuple):
    """A spec, for other processes.

    Attributes:
        name: of the spec.
    """

    name: str
    data: bytes

    @classmethod
    def of(cls, spec: ExecutionSpec, target: Target | None) -> Job:
        """Args:
        target: that of the spec's devices; None: the other process has the same devices, a CPU's.
        """
        options = {name: jax.config.values[name] for name in JAX_OPTIONS}
        with io.BytesIO() as file:
            pickle.dump((target, options, _plain(spec)), file)
            _Pickler(file).dump(dataclasses.replace(spec))  # without what the spec has computed
            return cls(folder_name(spec.fingerprint(), spec.num_pages), file.getvalue())

    def read(self) -> tuple[ExecutionSpec, Target | None]:
        """The spec on this process's devices or those of its target. Sets JAX's options.

        Raises:
            ValueError: programs that this process compiles would not be those of the spec.
        """
        with io.BytesIO(self.data) as file:
            target, options, identity = pickle.load(file)
            for name, value in options.items():
                jax.config.update(name, value)
            spec = _Unpickler(file, jax.devices() if target is None else target.devices()).load()
        different = difference(identity, _plain(spec))
        if different is not None:
            raise ValueError(f"this process cannot compile them: {different}")
        return spec, target


class Compiled(NamedTuple):
    """A program that another process has compiled.

    Attributes:
        data: see `program_store.packed`.
    """

    data: bytes
    memory: ProgramMemory
    seconds: float


def _plain(spec: ExecutionSpec) -> dict[str, Any]:
    identity: dict[str, Any] = json.loads(json.dumps(spec.identity(), default=list))
    return identity


class _Pickler(pickle.Pickler):
    """Pickles meshes by the numbers of their devices."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Mesh):
            numbers = np.vectorize(lambda device: device.id)(obj.devices).tolist()
            return numbers, obj.axis_names, [kind.name for kind in obj.axis_types]
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, devices: Sequence[jax.Device]) -> None:
        super().__init__(file)
        self._devices = {device.id: device for device in devices}

    def persistent_load(self, pid: Any) -> Mesh:
        numbers, names, kinds = pid
        devices = np.vectorize(lambda number: self._devices[number], otypes=[object])(numbers)
        return Mesh(devices, names, axis_types=tuple(AxisType[kind] for kind in kinds))


class CompileFailed(Exception):
    """The reason why a program was not compiled."""


class CannotStart(Exception):
    """The reason why a process cannot be started."""


def children_count(threads: int, available: int) -> int:
    """Number of processes. Two cores are left to the engine and its server, and half of the memory.

    Args:
        threads: maximum number.
        available: bytes of the host's memory that are available.
    """
    return min(threads, max(CORES - 2, 1), available // 2 // MEMORY)


@dataclass(slots=True)
class _Task:
    job: Job
    key: Key
    result: Future[Compiled] = field(default_factory=Future)
    deaths: int = 0  # of processes that were compiling it


class CompileChildren:
    """Processes that compile programs, in the order in which they were asked for.

    Processes start with the first programs. If one ends, another takes its place and its program is compiled
    once more; the second time, the program fails. All end with `close`, or when this process ends.

    Args:
        count: number of processes.
        target: GPUs to compile for; None: this process's CPU.
        root: of the cache that keeps lowered kernels; None: they are not kept.
    """

    def __init__(self, count: int, target: Target | None = None, root: Path | None = None) -> None:
        self.target, self._root = target, root
        self._tasks, self._change = deque[_Task](), threading.Condition()
        self._early: dict[tuple[str, Key], _Task] = {}  # by name of the job
        self._children = dict[int, _Child]()  # by thread
        self._count, self._started, self._failed = count, 0, 0
        self._closed = self._serving = False

    @property
    def works(self) -> bool:
        """Whether processes can be started, as far as is known."""
        return not self._failed or self._failed < self._started

    def begin(self, job: Job, keys: list[Key]) -> None:
        """Compiles programs before `compile` asks for them."""
        for key in keys:
            self._early[job.name, key] = self._add(_Task(job, key))

    def forget(self) -> None:
        """Leaves out programs that `compile` has not asked for."""
        for task in self._early.values():
            task.result.cancel()
        self._early.clear()

    def compile(self, job: Job, key: Key) -> Future[Compiled]:
        """Compiles a program of this job. The result raises CompileFailed if it cannot be compiled."""
        early = self._early.pop((job.name, key), None)
        return (self._add(_Task(job, key)) if early is None else early).result

    def step_aside(self) -> None:
        """Steps run from now on: the processes get only time of processors that nobody else wants."""
        self._serving = True
        for child in [*self._children.values()]:
            child.step_aside()

    def prefer(self, keys: Sequence[Key]) -> None:
        """From now on, compiles these first, in this order, and the others in theirs."""
        order = {key: place for place, key in enumerate(keys)}
        with self._change:
            self._tasks = deque(sorted(self._tasks, key=lambda task: order.get(task.key, len(order))))

    def close(self) -> None:
        """Ends the processes. May be called repeatedly."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for child in [*self._children.values()]:
            child.end()
        self._fail_all()

    def _add(self, task: _Task) -> _Task:
        with self._change:
            if not self.works or self._closed:
                task.result.set_exception(CompileFailed(ENDED))
                return task
            self._tasks.append(task)
            self._change.notify()
            if self._started < self._count:
                # threads that only read and write sockets, so none has to end before the interpreter
                name = f"compile {self._started}"
                threading.Thread(target=self._run, name=name, args=(self._started,), daemon=True).start()
                self._started += 1
        return task

    def _next(self) -> _Task | None:
        """Waits for the next task; None: there will be none."""
        with self._change:
            while not self._closed:
                while self._tasks:
                    task = self._tasks.popleft()
                    if task.deaths or task.result.set_running_or_notify_cancel():
                        return task
                self._change.wait()
        return None

    def _run(self, number: int) -> None:
        """Feeds a process, and those that take its place."""
        child: _Child | None = None
        try:
            child = self._children[number] = self._start()
            while (task := self._next()) is not None:
                child = self._compile(number, child, task)
        except CannotStart as error:
            self._give_up(str(error))
        finally:
            if child is not None:
                child.end()

    def _compile(self, number: int, child: _Child, task: _Task) -> _Child:
        """Returns the process that takes the next task."""
        try:
            task.result.set_result(child.compile(task.job, task.key))
            return child
        except CompileFailed as error:
            task.result.set_exception(error)
            return child
        except (OSError, EOFError):
            why = child.end(GRACE)
        if self._closed:
            task.result.set_exception(CompileFailed(ENDED))
            return child
        task.deaths += 1
        if task.deaths == 1:
            log.warning("a process ended while it compiled %s, another one tries again: %s", task.key, why)
            with self._change:
                self._tasks.appendleft(task)
                self._change.notify()
        else:
            task.result.set_exception(CompileFailed(f"the processes that compiled it ended twice, {why}"))
        self._children[number] = started = self._start()
        return started

    def _start(self) -> _Child:
        child = _Child(self._root, idle=self._serving)
        if self._serving:  # since it was started
            child.step_aside()
        return child

    def _give_up(self, why: str) -> None:
        """A process could not be started: the others do its work, if there are any."""
        with self._change:
            self._failed += 1
            none = not self.works and not self._closed
        if none:
            log.warning("no process can be started that compiles programs, so this one does: %s", why)
            self._fail_all()

    def _fail_all(self) -> None:
        with self._change:
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            if task.deaths or task.result.set_running_or_notify_cancel():
                task.result.set_exception(CompileFailed(ENDED))


class _Child:
    """A process that compiles, see compile_child.py.

    Args:
        root: see CompileChildren.
        idle: whether it steps aside from its beginning.

    Raises:
        CannotStart: it cannot be started.
    """

    def __init__(self, root: Path | None, *, idle: bool) -> None:
        ours, theirs = socket.socketpair()
        words = [str(theirs.fileno()), *([] if root is None else [str(root)])]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=self._output,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                    # Ctrl-C is for this process, which ends the others. Not another session: Linux may
                    # divide processors among sessions, whatever the priorities in them.
                    process_group=0,
                )
            with contextlib.suppress(OSError):
                lower = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, lower)  # it has one thread yet
            if idle:
                self.step_aside()
        except (OSError, ValueError) as error:
            ours.close()
            self._output.close()
            raise CannotStart(str(error)) from error
        self._connection, self._lock = Connection(ours.detach()), threading.Lock()
        self._jobs = set[str]()  # names of those that it knows
        self._why: str | None = None  # it ended
        with contextlib.suppress(OSError, EOFError):
            if self._connection.poll(PATIENCE) and self._connection.recv_bytes() == READY:
                return
        raise CannotStart(self.end(GRACE))

    def compile(self, job: Job, key: Key) -> Compiled:
        """
        Raises:
            CompileFailed: it cannot be compiled.
            OSError, EOFError: the process has ended.
        """
        known = job.name in self._jobs
        self._jobs.add(job.name)
        self._connection.send_bytes(pickle.dumps((job.name, None if known else job.data, key)))
        error, memory, seconds = pickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise CompileFailed(error)
        return Compiled(self._connection.recv_bytes(), memory, seconds)

    def step_aside(self) -> None:
        """Gives all its threads, and those and the processes that they start, the lowest priority: any other
        thread that wakes takes the processor at once, which it would not do with a high niceness.
        """
        with contextlib.suppress(OSError, AttributeError):  # not on Linux, or it has ended
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

    def end(self, grace: float = 0.0) -> str:
        """Ends it, if it does not end in `grace` seconds. Returns what is known of its end. Thread-safe."""
        with self._lock:
            if self._why is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
                self._process.kill()
                code = self._process.wait()
                self._output.seek(0)
                lines = self._output.read().decode(errors="replace").splitlines()[-LINES:]
                by = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                self._why = " ".join([f"with {by}:" if lines else f"with {by}", *lines])
                self._output.close()
            return self._why


def _environment() -> dict[str, str]:
    """The environment of this process, with its packages and without its GPUs and JAX's own cache."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # programs from there cannot be serialized
    }
