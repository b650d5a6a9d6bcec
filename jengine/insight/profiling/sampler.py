"""A thread that samples all other threads a hundred times a second: their stacks, and the locks and system
calls they wait in.

It also measures how late it wakes up, as an estimate of any thread's wait for the interpreter's lock.
"""

from __future__ import annotations

import ast
import dis
import linecache
import platform
import re
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import islice
from traceback import walk_stack
from types import CodeType, FrameType

from jengine.insight.profiling.data import Flame, InterpreterWait, LockWait, SlowCall

UNKNOWN, RUNS = -2, -1  # special values for a system call's number
# System calls on files by number, as made by logging, caching and saving.
_NUMBERS = {
    "x86_64": {
        1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 8: "lseek", 18: "pwrite64", 20: "writev",
        73: "flock", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink",
        217: "getdents64", 257: "openat", 262: "newfstatat", 277: "sync_file_range", 285: "fallocate",
        332: "statx",
    },
    "aarch64": {
        32: "flock", 46: "ftruncate", 47: "fallocate", 56: "openat", 57: "close", 62: "lseek", 64: "write",
        66: "writev", 79: "newfstatat", 80: "fstat", 82: "fsync", 83: "fdatasync", 291: "statx",
    },
}  # fmt: skip
_NAMES = _NUMBERS.get(platform.machine(), {})
FILES = frozenset(name for names in _NUMBERS.values() for name in names.values())


def call_now(thread: int) -> int:
    """Number of the system call that a thread of this process is in; RUNS if it is in none."""
    try:
        with open(f"/proc/self/task/{thread}/syscall", "rb") as file:
            first = file.read(64).split(b" ", 1)[0].strip()
    except OSError:
        return UNKNOWN
    return RUNS if first in (b"running", b"-1") else int(first)


def processor(thread: int) -> tuple[int, int]:
    """Nanoseconds that a thread of this process ran, and waited for a processor; (-1, -1): unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            ran, waited, _ = file.read(96).split()
    except (OSError, ValueError):
        return -1, -1
    return int(ran), int(waited)


# of threading: wait for a notification, not for a held lock
NOTIFIED = ("wait", "wait_for", "join", "_wait_for_tstate_lock")
WRAPPERS = (threading.__file__,)  # the caller's line is more informative
INNER = 4  # innermost frames in which a lock taken by acquire() may be released
WITH = re.compile(r"with\s+([\w.\[\]'\"]+)\s*[:,]")
ACQUIRE = re.compile(r"(.+)\.(acquire|__enter__)\(", re.DOTALL)
FILE_CALL = re.compile(
    r"(?:[\w.\[\]]+\.)?(write|writelines|flush|print|pwrite|writev|fsync|fdatasync|open|rename|unlink)\("
)
WRITES = {"writelines": "write", "flush": "write", "print": "write", "pwrite": "pwrite64", "open": "openat"}
SLACK = 1e-4  # typical seconds by which a timer is late
NOTED = 1e-3  # minimum seconds of a listed wait for the interpreter's lock
KEPT = 20_000
DEPTH = 100  # maximum frames of a stack


def awaited_lock(top: FrameType) -> str:
    """The lock that a thread tries to acquire in this frame, such as "self._lock"; empty: none."""
    code = top.f_code
    if code.co_filename in WRAPPERS and code.co_name in NOTIFIED:
        return ""
    lock = _lock_at(code, top.f_lasti)
    if code.co_filename in WRAPPERS and lock and top.f_back is not None:  # Condition.__enter__
        return _lock_at(top.f_back.f_code, top.f_back.f_lasti) or lock
    return lock


@lru_cache(4096)
def _lock_at(code: CodeType, offset: int) -> str:
    if offset < 0:
        return ""
    operation = dis.opname[code.co_code[offset]]
    if operation == "BEFORE_WITH":
        return _source(code, offset - 2)  # the expression loaded before it, or that instruction's cache
    text = _source(code, offset)
    if match := WITH.match(text):  # Python 3.14: the call of __enter__
        return match[1]
    match = ACQUIRE.match(text) if operation.startswith("CALL") else None
    return match[1] if match else ""


@lru_cache(4096)
def file_call(code: CodeType, offset: int) -> str:
    """The system call that a Python call at this instruction makes, such as "fsync"; empty: none."""
    if offset < 0 or not dis.opname[code.co_code[offset]].startswith("CALL"):
        return ""
    match = FILE_CALL.match(_source(code, offset))
    return WRITES.get(match[1], match[1]) if match else ""


def _source(code: CodeType, offset: int) -> str:
    """The source text of the expression at an instruction."""
    start, end, left, right = list(code.co_positions())[offset // 2]
    if start is None or end is None or left is None or right is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(start, end + 1)]
    if not all(lines):
        return ""
    raw = [line.encode() for line in lines]  # columns count bytes
    raw[-1] = raw[-1][:right]
    raw[0] = raw[0][left:]
    return b"".join(raw).decode(errors="replace").strip()


def holder(waiting: FrameType, lock: str, others: Iterable[tuple[str, FrameType]]) -> str:
    """The probable holder of the lock, as "thread, in function (file:line)"; empty if none is found.

    Such a thread is inside a `with` block for a lock of the same name, or in the same function as the waiting
    thread and past the line at which that thread waits.

    Args:
        others: other threads by name, with their innermost frames.
    """
    name = lock.rpartition(".")[2]
    places = {frame.f_code: line for frame, line in islice(walk_stack(waiting), INNER)}
    suspects = []
    for thread, top in others:
        if awaited_lock(top).rpartition(".")[2] == name:
            continue  # it is waiting, too
        for frame, line in walk_stack(top):
            code = frame.f_code
            if name in _withs(code.co_filename, line or 0):
                return f"{thread}, in {frame_name(top.f_code, top.f_lineno)}"
            if line and line > places.get(code, line):
                suspects.append(f"{thread}, in {frame_name(top.f_code, top.f_lineno)}")
    return suspects[0] if len(suspects) == 1 else ""


@lru_cache(4096)
def _withs(file: str, line: int) -> frozenset[str]:
    """Last names of the expressions in `with` statements around this line."""
    return frozenset(name for first, last, name in _blocks(file) if first <= line <= last)


@cache
def _blocks(file: str) -> list[tuple[int, int, str]]:
    """(first line of the body, last line, last name) of each `with` statement of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for item in node.items:
                match item.context_expr:
                    case ast.Attribute(attr=last) | ast.Name(id=last):
                        blocks.append((node.body[0].lineno, node.end_lineno or node.lineno, last))
    return blocks


def frame_name(code: CodeType, line: int | None) -> str:
    """A frame's name, such as "schedule (jengine/scheduling/scheduler.py:120)"."""
    return f"{code.co_qualname} ({_short(code.co_filename)}:{line or code.co_firstlineno})".replace(";", ",")


@cache
def _short(file: str) -> str:
    """The last three parts of a path."""
    return "/".join(file.replace("\\", "/").split("/")[-3:])


class ThreadSampler:
    """Samples threads.

    Args:
        rate: samples a second.

    Attributes:
        own: the system's ids of all threads of the profiler.
        interval: seconds between two samples.
        samples: number of samples so far.
        late: total seconds by which samples were late without waiting for a processor, thus waiting for the
            interpreter's lock.
        calls: number of samples in system calls on files, by thread, call and Python frame.
        calls_at: number of samples at a Python call that makes such a call, likewise.
        slow_calls: calls, or consecutive calls from one line, that were seen by two or more consecutive
            samples.
    """

    def __init__(self, rate: int) -> None:
        self.interval = 1.0 / rate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile-sampler", daemon=True)
        self._stacks: dict[str, Counter[tuple[tuple[CodeType, int], ...]]] = defaultdict(Counter)
        self._waiting: dict[int, tuple[tuple[CodeType, int], LockWait]] = {}  # with the waiting instruction
        self._in_call: dict[int, SlowCall] = {}
        self._there: dict[int, threading.Thread] = {}
        self._names: dict[int, tuple[str, int]] = {}  # name and the system's id of each thread
        self._seen: dict[str, int] = {}  # all names so far
        self._ran: dict[int, int] = {}
        self.samples, self.late = 0, 0.0
        self.knows_run_queue = self.knows_calls = True
        self.lock_waits: deque[LockWait] = deque(maxlen=KEPT)
        self.interpreter_waits: deque[InterpreterWait] = deque(maxlen=KEPT)
        self.slow_calls: deque[SlowCall] = deque(maxlen=KEPT)
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.calls_at: Counter[tuple[str, str, str]] = Counter()
        self.own: set[int] = set()
        self._hidden: set[threading.Thread] = set()

    def start(self) -> None:
        """Starts, in a thread that also belongs to the profiler."""
        self.hide()
        self._thread.start()

    def hide(self) -> None:
        """Leaves this thread out of the profile."""
        self._hidden.add(threading.current_thread())
        self.own.add(threading.get_native_id())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def names(self) -> dict[int, str]:
        """Names of the threads seen so far, by the system's id."""
        return {native: name for name, native in self._seen.items()}

    def flames(self) -> list[Flame]:
        flames = []
        for thread, stacks in self._stacks.items():
            named: Counter[str] = Counter()
            for stack, count in stacks.items():
                shown = [(code, line) for code, line in stack if not code.co_filename.startswith("<frozen")]
                named[";".join(frame_name(code, line) for code, line in shown)] += count
            flames.append(Flame(thread, dict(named)))
        return flames

    # --- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        self.hide()
        native = threading.get_native_id()
        self.knows_run_queue = processor(native)[1] >= 0
        while not self._stop.is_set():
            before, planned = processor(native), time.perf_counter() + self.interval
            time.sleep(self.interval)
            now = time.perf_counter()
            self._note_late(now - planned, processor(native)[1] - before[1], now)
            self._sample(now)
        for _, wait in self._waiting.values():
            self._end(wait, time.perf_counter())
        self.slow_calls.extend(call for call in self._in_call.values() if call.seconds > self.interval)

    def _note_late(self, late: float, queued: int, now: float) -> None:
        """Counts lateness as a wait for the interpreter's lock, less the nanoseconds without a processor."""
        waited = late - 1e-9 * queued - SLACK
        if waited <= 0.0:
            return
        self.late += waited
        if waited >= NOTED:
            self.interpreter_waits.append(InterpreterWait(now - waited, waited, self._who_ran(waited)))

    def _who_ran(self, waited: float) -> str:
        """The only thread that ran for most of this wait, since the last sample."""
        busiest = [
            name
            for name, native in self._names.values()
            if 1e-9 * (processor(native)[0] - self._ran.get(native, 0)) >= 0.7 * waited
        ]
        return busiest[0] if len(busiest) == 1 else ""

    def _sample(self, now: float) -> None:
        current = sys._current_frames()
        self._learn_names()
        self.samples += 1
        tops = {ident: top for ident, top in current.items() if ident in self._names}
        for ident in self._waiting.keys() - tops.keys():  # threads that have ended
            self._end(self._waiting.pop(ident)[1], now)
        for ident, top in tops.items():
            name, native = self._names[ident]
            stack = tuple([(frame.f_code, line) for frame, line in islice(walk_stack(top), DEPTH)][::-1])
            self._stacks[name][stack] += 1
            self._ran[native] = processor(native)[0]
            self._sample_lock(ident, name, top, tops, now)
            self._sample_call(ident, name, native, top, now)

    def _learn_names(self) -> None:
        """Updates the names of current threads. A new thread may reuse the id of one that has ended."""
        there = {
            thread.ident: thread
            for thread in threading.enumerate()
            if thread.ident is not None and thread not in self._hidden
        }
        if there == self._there:
            return
        for ident, thread in there.items():
            if self._there.get(ident) is not thread:
                name, native = thread.name, thread.native_id or 0
                if self._seen.setdefault(name, native) != native:
                    name = f"{name} {native}"
                    self._seen[name] = native
                self._names[ident] = name, native
        for ident in self._names.keys() - there.keys():
            del self._names[ident]
        self._there = there

    def _sample_lock(
        self, ident: int, name: str, top: FrameType, tops: dict[int, FrameType], now: float
    ) -> None:
        place = top.f_code, top.f_lasti
        before, wait = self._waiting.get(ident, (None, None))
        if wait is not None and before == place:
            wait.seconds = now - wait.at
            wait.holder = wait.holder or self._holder(ident, top, wait.lock, tops)
            return
        if wait is not None:
            del self._waiting[ident]
            self._end(wait, now)
        if lock := awaited_lock(top):
            # the innermost one outside threading
            frames = (frame for frame, _ in walk_stack(top))
            frame = next((frame for frame in frames if frame.f_code.co_filename not in WRAPPERS), top)
            where = frame_name(frame.f_code, frame.f_lineno)
            started = LockWait(now, 0.0, name, lock, where, self._holder(ident, top, lock, tops))
            self._waiting[ident] = place, started

    def _holder(self, ident: int, top: FrameType, lock: str, tops: dict[int, FrameType]) -> str:
        return holder(
            top, lock, [(self._names[other][0], frame) for other, frame in tops.items() if other != ident]
        )

    def _end(self, wait: LockWait, now: float) -> None:
        """Ends a wait. A single sample, which says no seconds, may have hit a free lock."""
        if wait.seconds:
            wait.seconds = now - wait.at
            self.lock_waits.append(wait)

    def _sample_call(self, ident: int, name: str, native: int, top: FrameType, now: float) -> None:
        """A short call may have returned, and its thread wait; then the Python call names it."""
        number, known = call_now(native), self._in_call.get(ident)
        self.knows_calls = self.knows_calls and number != UNKNOWN
        seen = _NAMES.get(number, "")
        call = seen or file_call(top.f_code, top.f_lasti)
        where = frame_name(top.f_code, top.f_lineno) if call else ""
        if known is not None:
            if known.name == call and known.where == where:
                known.seconds = now - known.at + self.interval
            else:
                del self._in_call[ident]
                if known.seconds > self.interval:
                    self.slow_calls.append(known)
        if call:
            (self.calls if seen else self.calls_at)[name, call, where] += 1
            if ident not in self._in_call:
                self._in_call[ident] = SlowCall(now, self.interval, name, call, where)
