"""A profile of one or several processes. Plain data that can be saved and sent to other processes; findings
derive from it.

Times are seconds of time.perf_counter(), a single clock for all processes of a machine, as in step records.
Threads are identified by name. If names are not unique, the thread's id is appended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from jengine.base.errors import InvalidArgument
from jengine.base.options import check_options, number, whole
from jengine.insight.profiling.device_trace import DeviceTimes
from jengine.insight.recording.records import Pause

if TYPE_CHECKING:
    from jengine.insight.recording.trace import Trace  # imports numpy

MAX_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What a profile measures.

    Args:
        seconds: duration of the timings. The heap is measured afterwards, for up to five more seconds.
        heap: whether to compare two snapshots of tracemalloc, which slows allocations.
        jax: whether to capture with jax.profiler, for up to 2 s, in processes that use JAX.
        system_calls: `proc` counts reads and writes by /proc and estimates times from samples; `off` counts
            none.
        rate: samples of the threads' stacks a second.

    Raises:
        InvalidArgument: a value out of range.
    """

    seconds: Annotated[float, number(f"from 0.1 to {MAX_SECONDS:g}", 0.1, MAX_SECONDS)] = 10.0
    heap: bool = True
    jax: bool = True
    system_calls: Literal["proc", "off"] = "proc"
    rate: Annotated[int, whole(1, 1000)] = 100

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def heap_seconds(self) -> float:
        return min(self.seconds, 5.0) if self.heap else 0.0


class Flame(msgspec.Struct, array_like=True):
    """Samples of a thread by stack: frames as "function (file:line)" from the root, joined by ";"."""

    thread: str
    stacks: dict[str, int]

    @property
    def samples(self) -> int:
        return sum(self.stacks.values())


class LockWait(msgspec.Struct, array_like=True):
    """A wait for a Python lock, as seen by samples.

    Attributes:
        lock: the expression for the lock, such as "self._lock".
        where: the waiting frame.
        holder: the probable holder as "thread, in function (file:line)"; empty if unknown.
    """

    at: float
    seconds: float
    thread: str
    lock: str
    where: str
    holder: str = ""


class InterpreterWait(msgspec.Struct, array_like=True):
    """A thread that woke up and waited for the interpreter's lock (GIL).

    Attributes:
        holder: the only thread that ran for most of that time; empty if there was none.
    """

    at: float
    seconds: float
    holder: str = ""


class SlowCall(msgspec.Struct, array_like=True):
    """A system call that took at least a millisecond, or that samples have seen.

    Attributes:
        where: the calling Python frame; empty if unknown.
    """

    at: float
    seconds: float
    thread: str
    name: str
    where: str = ""


class CallCount(msgspec.Struct, array_like=True):
    """System calls of a thread by name.

    Attributes:
        count: -1 if unknown.
        where: the Python frame in most samples of the call; empty if there are no samples.
    """

    thread: str
    name: str
    count: int
    seconds: float
    where: str = ""


class HeapGrowth(msgspec.Struct, array_like=True):
    """Growth of the heap between two snapshots, by the allocating line."""

    where: str
    bytes: int
    blocks: int


class ProcessProfile(msgspec.Struct, kw_only=True):
    """The profile of one process.

    Attributes:
        name: "engine" or "server", or what `capture_process` was called with.
        begun, ended: period of the timings.
        unix: seconds since 1970 at `begun`.
        important: names of threads that requests depend on: those that step an engine, and the main thread.
        samples: number of samples; late: total seconds by which samples were late without waiting for a
            processor.
        collections: garbage collections of at least a millisecond; pauses: (count, seconds) of all, by
            generation.
        counters: of the kernel, for this process.
        memory: resident bytes by part; device: bytes by part on devices with separate memory.
        heap_seconds: seconds between the two snapshots of `growth`.
        operations: (name, count, seconds) of the most expensive operations in jax.profiler's capture: kernels
            and copies of GPUs, or calls on all threads.
        device_times: what GPUs did during that capture.
        missing: measurements that failed, and the reasons.
        trace: step records, JSON of jengine.Trace; empty if no engine ran.
    """

    name: str
    pid: int
    command: str
    begun: float
    ended: float = 0.0
    unix: float = 0.0
    important: list[str] = []
    flames: list[Flame] = []
    samples: int = 0
    late: float = 0.0
    lock_waits: list[LockWait] = []
    interpreter_waits: list[InterpreterWait] = []
    collections: list[Pause] = []
    pauses: list[tuple[int, float]] = []
    calls: list[CallCount] = []
    slow_calls: list[SlowCall] = []
    counters: dict[str, float] = {}
    memory: dict[str, int] = {}
    device: dict[str, int] = {}
    growth: list[HeapGrowth] = []
    heap_seconds: float = 0.0
    operations: list[tuple[str, int, float]] = []
    device_times: list[DeviceTimes] = []
    missing: dict[str, str] = {}
    trace: bytes = b""

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def steps(self) -> Trace | None:
        """The step records of that period."""
        if not self.trace:
            return None
        from jengine.insight.recording.trace import Trace

        trace = Trace.from_json(self.trace)
        trace.steps = [step for step in trace.steps if self.begun <= step.ended <= self.ended]
        return trace


class Profile(msgspec.Struct, kw_only=True):
    """The result of `jengine profile`.

    Attributes:
        target: the server's model and address.
        processes: the engine's process comes first.
    """

    target: str
    processes: list[ProcessProfile]

    def to_json(self) -> bytes:
        """Serialize the profile for `from_json`."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Profile:
        """Raises InvalidArgument if the data is not a profile."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidArgument(
                "profile", f"{len(data)} bytes", f"is not a profile of this version of jengine: {error}"
            ) from None
