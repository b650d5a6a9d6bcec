"""A profile of some seconds of one or several processes. Plain data: it is saved, crosses processes, and findings are computed from it.

Times are seconds of time.perf_counter(), one clock for all processes of a machine, as in step records. Threads are known by name; where
names repeat, the thread's id follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from jengine.errors import InvalidArgument

if TYPE_CHECKING:
    from jengine.observe.trace import Trace  # brings numpy

SYSTEM_CALLS = ("auto", "perf", "strace", "proc", "off")  # how system calls are counted
MAX_SECONDS = 120.0


class ProfileOptions(msgspec.Struct, frozen=True):
    """What a profile measures.

    Args:
        seconds: of timings. The heap is measured afterwards, for up to five more.
        heap: compare two snapshots of tracemalloc, which slows what allocates.
        jax: capture with jax.profiler, in processes that use JAX.
        system_calls: `auto` takes the first that is installed and allowed: `perf trace`, `strace`, which slows what it watches, or what
            /proc tells; `off` counts none.
        rate: samples of the threads' stacks a second.

    Raises:
        InvalidArgument: a value out of range.
    """

    seconds: float = 10.0
    heap: bool = True
    jax: bool = True
    system_calls: str = "auto"
    rate: int = 100

    def __post_init__(self) -> None:
        if not 0.1 <= self.seconds <= MAX_SECONDS:
            raise InvalidArgument("seconds", self.seconds, f"must be from 0.1 to {MAX_SECONDS:g}")
        if self.system_calls not in SYSTEM_CALLS:
            raise InvalidArgument("system_calls", self.system_calls, f"must be one of {', '.join(SYSTEM_CALLS)}")
        if not 1 <= self.rate <= 1000:
            raise InvalidArgument("rate", self.rate, "must be from 1 to 1000 samples a second")

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
    """A thread waited for a lock of Python's, as far as samples show.

    Attributes:
        lock: the expression that names it, such as "self._lock".
        where: the frame that wanted it.
        holder: "thread, in function (file:line)": who very likely had it; empty where that is not known.
    """

    at: float
    seconds: float
    thread: str
    lock: str
    where: str
    holder: str = ""


class InterpreterWait(msgspec.Struct, array_like=True):
    """A thread that woke up waited for the interpreter's lock (GIL).

    Attributes:
        holder: the only thread that had a processor for most of that time; empty where there was none.
    """

    at: float
    seconds: float
    holder: str = ""


class Collection(msgspec.Struct, array_like=True):
    """Of the garbage collector: it stops all threads of a process."""

    at: float
    seconds: float
    generation: int
    collected: int
    thread: str


class SlowCall(msgspec.Struct, array_like=True):
    """A system call that took a millisecond or more, or was seen by samples.

    Attributes:
        where: the Python frame that made it; empty where that is not known.
    """

    at: float
    seconds: float
    thread: str
    name: str
    where: str = ""


class CallCount(msgspec.Struct, array_like=True):
    """System calls of a thread by name.

    Attributes:
        count: -1 where it is not known.
        where: the Python frame in which most samples saw it; empty where none did.
    """

    thread: str
    name: str
    count: int
    seconds: float
    where: str = ""


class Growth(msgspec.Struct, array_like=True):
    """Of the heap between two snapshots, by the line that allocated."""

    where: str
    bytes: int
    blocks: int


class ProcessProfile(msgspec.Struct, kw_only=True):
    """One process.

    Attributes:
        name: "engine", "server", or the program.
        begun, ended: of the timings.
        busy: what of that findings are about: not the start of a command, before its first step.
        unix: seconds since 1970 at `begun`.
        important: names of the threads that requests wait for: those that step an engine, and the main thread.
        sampler: what sampled the flames.
        samples: how often the stacks were looked at; `late` seconds, in all, that a sample was late without waiting for a processor.
        collections: those of a tenth of a millisecond or more; pauses: of all, by generation, (count, seconds).
        calls_by: what counted system calls: "perf trace", "strace", "/proc"; empty: nothing.
        counters: hardware's and the kernel's, as `perf stat` or /proc names them.
        disturbed: (begin, end) of what the profile itself held the process up with: steps of that time say nothing.
        memory: resident bytes by part; device: bytes by part on devices that have their own memory.
        heap_seconds: between the two snapshots of `growth`.
        operations: (name, count, seconds) of JAX's operations that took longest, over all threads.
        missing: what could not be measured, and why.
        trace: step records, JSON of jengine.Trace; empty where no engine ran.
    """

    name: str
    pid: int
    command: str
    begun: float
    ended: float = 0.0
    busy: tuple[float, float] = (0.0, 0.0)
    unix: float = 0.0
    important: list[str] = []
    sampler: str = ""
    flames: list[Flame] = []
    samples: int = 0
    late: float = 0.0
    lock_waits: list[LockWait] = []
    interpreter_waits: list[InterpreterWait] = []
    collections: list[Collection] = []
    pauses: list[tuple[int, float]] = []
    calls_by: str = ""
    calls: list[CallCount] = []
    slow_calls: list[SlowCall] = []
    counters: dict[str, float] = {}
    disturbed: list[tuple[float, float]] = []
    memory: dict[str, int] = {}
    device: dict[str, int] = {}
    growth: list[Growth] = []
    heap_seconds: float = 0.0
    operations: list[tuple[str, int, float]] = []
    missing: dict[str, str] = {}
    trace: bytes = b""

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def busy_seconds(self) -> float:
        return max(self.busy[1] - self.busy[0], 1e-9)

    @property
    def steps(self) -> Trace | None:
        """Its step records of that time."""
        if not self.trace:
            return None
        from jengine.observe.trace import Trace

        trace = Trace.from_json(self.trace)
        trace.steps = [step for step in trace.steps if self.begun <= step.ended <= self.ended]
        return trace


class Profile(msgspec.Struct, kw_only=True):
    """What `jengine profile` has measured.

    Attributes:
        target: the server's address, or the command.
        processes: the one with the engine first.
    """

    target: str
    processes: list[ProcessProfile]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Profile:
        """Raises InvalidArgument where it is none."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidArgument("profile", f"{len(data)} bytes", f"is no profile of this version of jengine: {error}") from None
