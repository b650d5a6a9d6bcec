"""Global and shared memory: bytes, bounds, alignment, and who wrote and read them last.

A shadow has a few numbers for each granule: the bytes of the smallest store of the kernel to that memory, at
most 4. Writers and sets of readers are interned, so that an access of 32 lanes usually compares one number.

PTX ISA, "Memory Consistency Model": two accesses that overlap, of which one writes, and which are not ordered
by causality are a race, unless both are strong and each other's scope includes them ("Morally strong
operations").
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx_machine.clocks import GLOBAL_FENCED, MANY, SEEN, SHARED_FENCED, WarpClock
from tools.ptx_machine.findings import Fault, Findings

NEVER, HOST, BARRIER = (
    0,
    1,
    2,
)  # writers: nobody yet; the host, before the kernel; the place holds an mbarrier
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WEAK, CTA, GPU = range(3)  # strength of an access: weak, or the scope of a strong one


class Restart(Exception):
    """The run starts again with another setting: it shows what could not be known before."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)
        self.settings = settings


@dataclass(frozen=True, slots=True)
class Access:
    """What is common to the accesses of one operation.

    Attributes:
        clock: of the warp.
        agent, count: what the shadow keeps of it.
        line: of the PTX.
        proxy: whether it is made through the async proxy.
        strength: WEAK, CTA or GPU.
        block: number of the thread block.
    """

    clock: WarpClock
    agent: int
    count: int
    line: int
    proxy: bool = False
    strength: int = WEAK
    block: int = 0


class Log:
    """Interned writers and sets of readers of all memories of a run."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.writers: list[Any] = [None, None, None]
        self.writer_ids: dict[Any, int] = {}
        self.sets: list[tuple[tuple[int, int, int, int, int], ...]] = [()]
        self.set_ids: dict[Any, int] = {(): 0}
        self.after: dict[Any, tuple[int, int]] = {}

    def writer(self, x: Access) -> int:
        key = x.agent, x.count, x.line, not x.proxy, x.strength, x.block
        found = self.writer_ids.get(key)
        if found is None:
            found = self.writer_ids[key] = len(self.writers)
            self.writers.append(key)
        return found

    def readers(self, old: int, x: Access) -> tuple[int, int]:
        """The set after a read, and 0: only this read, 1: also earlier ones of its agent, 2: of others."""
        key = old, x.agent, x.count, x.line, x.strength
        found = self.after.get(key)
        if found is None:
            table = x.clock.common.table[SEEN]
            left = [r for r in self.sets[old] if table[r[0]] < r[1]]
            others = [r for r in left if r[0] != x.agent]
            new = (*others, (x.agent, x.count, x.line, x.strength, x.block))
            number = self.set_ids.setdefault(new, len(self.sets))
            if number == len(self.sets):
                self.sets.append(new)
            found = self.after[key] = number, 2 if others else int(bool(left))
        return found


def both_strong(x: Access, strength: int, block: int) -> bool:
    """PTX ISA, "Morally strong operations": strong, and each other's scope includes them."""
    return bool(strength and x.strength and (block == x.block or min(strength, x.strength) >= GPU))


def distinct(ids: np.ndarray) -> list[int]:
    first = ids[0]
    if (ids == first).all():
        return [int(first)]
    found: list[int] = np.unique(ids).tolist()
    return found


class Shadow:
    """Who wrote and read the granules of a memory.

    Arguments to its methods: g [n], granules, or a slice of them; lanes: [n], the lane of each, or one for
        all.
    """

    def __init__(self, log: Log, granules: int, name: str, shared: bool, initialised: bool) -> None:
        self.log, self.name = log, name
        self.fenced = SHARED_FENCED if shared else GLOBAL_FENCED
        self.writers = np.full(granules, HOST if initialised else NEVER, np.int32)
        self.writer_lanes = np.full(granules, MANY, np.int8)
        self.readers = np.zeros(granules, np.int32)
        self.reader_lanes = np.full(granules, MANY, np.int8)

    def read(self, g: Any, lanes: Any, x: Access, what: str, uninitialised: str = "uninitialised") -> None:
        self._after_writes(g, lanes, x, what, uninitialised)
        self._record_read(g, lanes, x)

    def write(self, g: Any, lanes: Any, x: Access, what: str, same: bool = False) -> None:
        """same: the values are those that are there: several threads may store one result."""
        self._after_writes(g, lanes, x, what, "", same)
        self._after_reads(g, lanes, x, what, same)
        self.writers[g] = self.log.writer(x)
        self.readers[g] = 0
        self._set_lanes(self.writer_lanes, g, lanes)

    # --- checks

    def _after_writes(
        self, g: Any, lanes: Any, x: Access, what: str, uninitialised: str, same: bool = False
    ) -> None:
        ids = self.writers[g]
        table = x.clock.common.table
        for i in distinct(ids):
            if i == NEVER:
                if uninitialised:
                    self._note(uninitialised, f"{what} reads {self.name} that nothing has written", x.line)
                continue
            if i == HOST:
                continue
            if i == BARRIER:
                self._note("barrier", f"{what} touches the bytes of an mbarrier", x.line)
                continue
            agent, count, line, generic, strength, block = self.log.writers[i]
            # the end of an asynchronous write is a proxy fence itself ("Async proxy")
            fence = x.proxy and generic
            if table[self.fenced if fence else SEEN, agent] >= count:
                continue
            if both_strong(x, strength, block):
                continue
            if self._ordered(SEEN, agent, count, ids == i, g, lanes, self.writer_lanes, x):
                if not fence or self._ordered(
                    self.fenced, agent, count, ids == i, g, lanes, self.writer_lanes, x
                ):
                    continue
                text = f"{what} of {self.name} after a generic write without fence.proxy.async"
                self._note("proxy", text, x.line, line)
            elif same:
                self._note("same value", f"{what} of {self.name} repeats another thread's", x.line, line)
            else:
                self._note("race", f"{what} of {self.name} is not ordered after a write", x.line, line)

    def _after_reads(self, g: Any, lanes: Any, x: Access, what: str, same: bool) -> None:
        ids = self.readers[g]
        table = x.clock.common.table[SEEN]
        for i in distinct(ids):
            for agent, count, line, strength, block in self.log.sets[i]:
                if same or table[agent] >= count or both_strong(x, strength, block):
                    continue
                if not self._ordered(SEEN, agent, count, ids == i, g, lanes, self.reader_lanes, x):
                    self._note("race", f"{what} of {self.name} is not ordered after a read", x.line, line)

    def _ordered(
        self,
        row: int,
        agent: int,
        count: int,
        at: np.ndarray,
        g: Any,
        lanes: Any,
        owners: np.ndarray,
        x: Access,
    ) -> bool:
        """Whether each lane's access comes after one of the lanes that are noted."""
        theirs = owners[g][at].tolist()
        mine = lanes[at].tolist() if isinstance(lanes, np.ndarray) else [int(lanes)] * len(theirs)
        return all(
            x.clock.knows(row, agent, owner, count, lane)
            for owner, lane in set(zip(theirs, mine, strict=True))
        )

    # --- records

    def _record_read(self, g: Any, lanes: Any, x: Access) -> None:
        ids = self.readers[g]
        every = distinct(ids)
        if len(every) == 1:
            self._join(g, lanes, every[0], x)
            return
        if isinstance(g, slice):
            g = np.arange(g.start, g.stop)
        for i in every:
            at = ids == i
            self._join(g[at], lanes[at] if isinstance(lanes, np.ndarray) else lanes, i, x)

    def _join(self, g: Any, lanes: Any, old: int, x: Access) -> None:
        self.readers[g], others = self.log.readers(old, x)
        if others == 1:
            lanes = np.where(self.reader_lanes[g] == lanes, lanes, MANY)
        elif others:
            lanes = MANY
        self._set_lanes(self.reader_lanes, g, lanes)

    def _set_lanes(self, of: np.ndarray, g: Any, lanes: Any) -> None:
        of[g] = lanes
        if isinstance(lanes, np.ndarray):
            twice = of[g] != lanes
            if twice.any():
                of[g[twice]] = MANY

    def _note(self, kind: str, message: str, line: int, other: int = 0) -> None:
        self.log.findings.add(kind, message, line, other)


class Shared:
    """A block's shared memory. Addresses are those of the shared window."""

    def __init__(
        self, log: Log | None, base: int, size: int, granule: int, garbage: Callable[[int], np.ndarray]
    ) -> None:
        self.base, self.end = base, base + size
        whole = -(-self.end // 16) * 16
        self.bytes = garbage(whole)
        self.view = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}
        self.shift = granule.bit_length() - 1
        self.shadow = Shadow(log, whole >> self.shift, "shared memory", True, False) if log else None

    def check(self, low: int, high: int) -> None:
        """Bytes low to high - 1 must exist."""
        if low < self.base or high > self.end:
            has = f"which has {self.base} to {self.end - 1}"
            raise Fault(f"out of bounds: bytes {low} to {high - 1} of shared memory, {has}")

    def read(self, at: np.ndarray, width: int, lanes: Any, x: Access, what: str) -> None:
        """Before a read of `width` bytes at addresses [n]."""
        if self.shadow:
            self.shadow.read(*granules(at, width, self.shift, lanes), x, what)

    def write(self, at: np.ndarray, width: int, lanes: Any, x: Access, what: str) -> None:
        """Before a write."""
        if self.shadow:
            self.shadow.write(*granules(at, width, self.shift, lanes), x, what)


def granules(at: np.ndarray, width: int, shift: int, lanes: Any) -> tuple[np.ndarray, Any]:
    first, per = at >> shift, max(width >> shift, 1)
    if per == 1:
        return first, lanes
    g = (first[:, None] + np.arange(per)).ravel()
    return g, np.repeat(lanes, per) if isinstance(lanes, np.ndarray) else lanes


@dataclass
class Array:
    """An array in global memory. Arrays of a launch lie at 1 << 32, 2 << 32 and so on.

    Attributes:
        written: whether the host wrote it: inputs yes, outputs no.
    """

    name: str
    values: np.ndarray
    written: bool = True


class Buffer:
    """An array in global memory. Offsets are in bytes.

    An input has no shadow until the kernel writes to it. If it has been read before that, the run starts
    again with one.
    """

    def __init__(
        self, base: int, given: Array, data: np.ndarray, shift: int, log: Log | None, watch: bool
    ) -> None:
        self.name, self.base, self.size, self.given = given.name, base, given.values.nbytes, given
        self.data = data
        self.view = {n: data.view(t) for n, t in UNSIGNED.items()}
        self.shift, self.log = shift, log
        self.touched = self.was_read = False
        self.shadow: Shadow | None = None
        if watch or not given.written:
            self._watch()

    def _watch(self) -> None:
        if self.log:
            self.shadow = Shadow(self.log, len(self.data) >> self.shift, self.name, False, self.given.written)

    def read(self, at: np.ndarray, width: int, lanes: Any, x: Access, what: str) -> None:
        """Before a read of `width` bytes at offsets [n]."""
        if self.shadow is None:
            self.was_read = True
        elif at.size:
            self.shadow.read(*granules(at, width, self.shift, lanes), x, what)

    def write(self, at: np.ndarray, width: int, lanes: Any, x: Access, what: str, same: bool = False) -> None:
        """Before a write."""
        if self.log and self.shadow is None:
            if self.was_read:
                raise Restart(watched=self.name)
            self._watch()
        self.touched = True
        if self.shadow and at.size:
            self.shadow.write(*granules(at, width, self.shift, lanes), x, what, same)

    def array(self) -> np.ndarray:
        return self.data[: self.size].view(self.given.values.dtype).reshape(self.given.values.shape)

    def unwritten(self) -> np.ndarray:
        """[bytes]: nothing has written it."""
        if self.shadow is None:
            return np.zeros(self.size, bool)
        return np.repeat(self.shadow.writers == NEVER, 1 << self.shift)[: self.size]


class Global:
    """All arrays of a launch."""

    def __init__(
        self,
        arrays: list[Array],
        log: Log | None,
        granule: int,
        watched: set[str],
        garbage: Callable[[int], np.ndarray],
    ) -> None:
        self.shift = granule.bit_length() - 1
        self.buffers = []
        for i, given in enumerate(arrays):
            raw = np.frombuffer(np.ascontiguousarray(given.values).tobytes(), np.uint8)
            whole = -(-max(len(raw), 1) // 16) * 16
            data = garbage(whole)
            if given.written:
                data[: len(raw)] = raw
            self.buffers.append(Buffer((i + 1) << 32, given, data, self.shift, log, given.name in watched))
        self.bases = [b.base for b in self.buffers]

    def buffer(self, low: int, high: int) -> Buffer:
        """The array that holds the addresses low to high - 1."""
        i = bisect.bisect_right(self.bases, low) - 1
        if i < 0:
            raise Fault(f"out of bounds: address {low:#x} lies in no array")
        found = self.buffers[i]
        if high > found.base + found.size:
            place = low - found.base
            last = high - found.base - 1
            raise Fault(f"out of bounds: bytes {place} to {last} of {found.name}, which has {found.size}")
        return found
