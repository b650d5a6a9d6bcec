"""Asynchronous copies: cp.async, bulk copies and tensor copies (TMA).

PTX ISA, "Asynchronous copy", "cp.async", "cp.async.bulk", "cp.async.bulk.tensor" and their commit_group and
wait_group. cp.async goes through the generic proxy, bulk copies through the async proxy ("Async proxy"). A
copy may happen at any time from its start to the wait that covers it: until then its destination holds
garbage, and its source is still read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tools.ptx_machine.barriers import MBarrier, find_mbarrier, shared_addresses
from tools.ptx_machine.block import Block
from tools.ptx_machine.clocks import COPY, READ, SEEN, SHARED_FENCED, WRITE, Lanes
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.memory import Access, Buffer, granules
from tools.ptx_machine.operands import Imm, Mem
from tools.ptx_machine.swizzle import period, swizzled
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.tensor_maps import TensorMap
from tools.ptx_machine.warp import Operation, Wait, Warp

LINE = 16  # bytes that bulk copies move at once, where nothing smaller matters
ISSUED, FETCHED, DONE = range(3)


@dataclass(eq=False)
class Move:
    """Where a copy's units lie.

    Attributes:
        unit: bytes of each.
        shared: index of each in shared memory, in units; `range`: bytes of shared memory as a range, or None.
        offsets: in bytes, of each in the array.
        inside: which exist in global memory; None: all. Others are loaded as zeros and not stored.
    """

    unit: int
    shared: np.ndarray
    range: tuple[int, int] | None
    buffer: Buffer
    offsets: np.ndarray
    inside: np.ndarray | None

    def shared_granules(self, shift: int) -> Any:
        if self.range is not None:
            return slice(self.range[0] >> shift, self.range[1] >> shift)
        return granules(self.shared * self.unit, self.unit, shift, 0)[0]

    def used(self) -> np.ndarray:
        """Offsets of what exists in global memory."""
        return self.offsets if self.inside is None else self.offsets[self.inside]

    def _view(self, data: np.ndarray) -> np.ndarray:
        return data.view(f"V{self.unit}")

    def fetch_global(self) -> np.ndarray:
        view = self._view(self.buffer.data)
        if self.inside is None:
            return view[self.offsets // self.unit]
        out = np.zeros(len(self.offsets), view.dtype)
        out[self.inside] = view[self.offsets[self.inside] // self.unit]
        return out

    def put_global(self, values: np.ndarray) -> None:
        view = self._view(self.buffer.data)
        if self.inside is None:
            view[self.offsets // self.unit] = values
        else:
            view[self.offsets[self.inside] // self.unit] = values[self.inside]

    def fetch_shared(self, block: Block) -> np.ndarray:
        return self._view(block.shared.bytes)[self.shared]

    def put_shared(self, block: Block, values: np.ndarray) -> None:
        self._view(block.shared.bytes)[self.shared] = values

    def spoil_shared(self, block: Block) -> None:
        size = len(self.shared) * self.unit
        self.put_shared(block, block.device.scheduler.garbage(size).view(f"V{self.unit}"))

    def spoil_global(self, block: Block) -> None:
        size = len(self.shared) * self.unit
        self.put_global(block.device.scheduler.garbage(size).view(f"V{self.unit}"))


def linear(block: Block, at: int, address: int, size: int) -> Move:
    """A bulk copy's bytes."""
    if at % 16 or address % 16 or size % 16:
        what = f"bulk copy of {size} bytes, shared address {at}, global {address:#x}"
        raise Fault(f"misaligned: {what}: must be multiples of 16")
    block.shared.check(at, at + size)
    buffer = block.device.memory.buffer(address, address + max(size, 1))
    offsets = np.arange(address - buffer.base, address - buffer.base + size, LINE)
    return Move(LINE, np.arange(at // LINE, (at + size) // LINE), (at, at + size), buffer, offsets, None)


def boxed(block: Block, tensor: TensorMap, coords: list[int], at: int) -> Move:
    """A tensor copy's bytes."""
    if at % 128:
        raise Fault(f"misaligned: tensor copy at shared address {at}, must be a multiple of 128")
    if len(coords) != len(tensor.sizes):
        raise Fault(f"{len(coords)} coordinates for a tensor map of rank {len(tensor.sizes)}")
    size = tensor.size
    offsets, inside = tensor.elements(coords)
    unit, item = tensor.itemsize, tensor.itemsize
    first, length = coords[0], tensor.box[0]
    if first * item % LINE == 0 and (inside is None or (first >= 0 and first + length <= tensor.sizes[0])):
        unit = LINE
        offsets = offsets[:: LINE // item]
        inside = inside if inside is None else inside[:: LINE // item]
    places = swizzled(at + np.arange(0, size, unit), tensor.swizzle)
    whole = tensor.swizzle == 16 or not (at % period(tensor.swizzle) or size % period(tensor.swizzle))
    block.shared.check(int(places.min()), int(places.max()) + unit)
    buffer = block.device.memory.buffer(tensor.base, tensor.base + 1)
    offsets = offsets + (tensor.base - buffer.base)
    used = offsets if inside is None else offsets[inside]
    if used.size and (used.min() < 0 or used.max() + unit > buffer.size):
        raise Fault(
            f"out of bounds: a tensor copy touches bytes {used.min()} to {used.max()} of {buffer.name}"
        )
    return Move(unit, places // unit, (at, at + size) if whole else None, buffer, offsets, inside)


# --- loads that an mbarrier counts


class Load:
    """A bulk or tensor load in flight."""

    fills = True

    def __init__(self, warp: Warp, lane: int, move: Move, found: MBarrier) -> None:
        self.block, self.move, self.barrier, self.line = warp.block, move, found, warp.line
        self.phase = found.phase + 1
        self.access = Access(warp.clock, found.agent, self.phase, warp.line, True, block=self.block.number)
        shared = self.block.shared
        if shared.shadow:
            shared.shadow.write(move.shared_granules(shared.shift), lane, self.access, "copy")
        move.buffer.read(move.used(), move.unit, lane, self.access, "copy")
        move.spoil_shared(self.block)

    def advance(self) -> bool:
        self.move.put_shared(self.block, self.move.fetch_global())
        if self.barrier.phase + 1 != self.phase:
            text = (
                "an mbarrier's phase completed before a copy that reports to it: its bytes were not expected"
            )
            self.block.device.findings.add("race", text, self.line, self.barrier.line)
            if shadow := self.block.shared.shadow:
                late = replace(self.access, count=self.barrier.phase + 1)
                shadow.writers[self.move.shared_granules(self.block.shared.shift)] = shadow.log.writer(late)
        self.barrier.land(len(self.move.shared) * self.move.unit, self.line)
        return True


def load(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """cp.async.bulk and cp.async.bulk.tensor from global to shared memory."""
    warp.produces = True
    bars = shared_addresses(warp, ins.args[3 if "tensor" not in ins.parts else 2])
    to = shared_addresses(warp, ins.args[0])
    for lane in lanes.list:
        found = find_mbarrier(warp, int(bars[lane]), warp.device.lanes_of(lane))
        if not found.ready:
            agent, creator, count = found.creator
            found.ready = warp.clock.knows(SHARED_FENCED, agent, creator, count, lane)
            if not found.ready:
                warp.device.note(
                    "proxy", "an mbarrier's initialisation was not fenced for the async proxy", found.line
                )
        if "tensor" in ins.parts:
            move = boxed(warp.block, *_map(warp, ins.args[1], lane), int(to[lane]))
        else:
            source, size = warp.addresses(ins.args[1]), warp.get(ins.args[2])
            move = linear(warp.block, int(to[lane]), int(source[lane]), int(size[lane]))
        warp.block.pending.append(Load(warp, lane, move, found))


def _map(warp: Warp, operand: Any, lane: int) -> tuple[TensorMap, list[int]]:
    assert isinstance(operand, Mem)
    assert operand.coords is not None
    tensor = warp.device.tensor_map(int(warp.addresses(operand)[lane]))
    return tensor, [int(warp.get(c).view(np.int32)[lane]) for c in operand.coords]


# --- copies that groups count


@dataclass(eq=False)
class Grouped:
    """A copy that a wait_group waits for.

    Attributes:
        group: [32] the number of its group in each lane that started it, from 1; 0: not yet committed; -1: no
            such lane.
        stamp: its count in the clock.
        state: ISSUED, FETCHED (it needs its source no more), DONE.
        waited: [2, 32]: a wait of the lane has covered it, until FETCHED, until DONE.
    """

    fills = False
    block: Block
    line: int
    stamp: int
    group: np.ndarray
    state: int = ISSUED
    waited: np.ndarray = field(default_factory=lambda: np.zeros((2, 32), bool))

    def advance(self) -> bool:
        raise NotImplementedError


@dataclass(eq=False)
class Store(Grouped):
    """A bulk or tensor store."""

    move: Any = None
    values: Any = None

    def advance(self) -> bool:
        if self.state == ISSUED:
            self.values = self.move.fetch_shared(self.block)
            self.state = FETCHED
            return False
        self.move.put_global(self.values)
        self.state = DONE
        return True


@dataclass(eq=False)
class Copy(Grouped):
    """One cp.async of some lanes: `size` bytes each, of which `kept` [lanes] are read; the rest are zeros."""

    at: Any = None
    size: int = 16
    parts: Any = None  # buffer, which lanes, offsets
    kept: Any = None

    def advance(self) -> bool:
        out = np.zeros((len(self.at), self.size), np.uint8)
        for buffer, some, offsets in self.parts:
            out[some] = buffer.data[offsets[:, None] + np.arange(self.size)]
        out[np.arange(self.size)[None] >= self.kept[:, None]] = 0
        self.block.shared.bytes[self.at[:, None] + np.arange(self.size)] = out
        self.state = DONE
        return True


@dataclass(eq=False)
class Arrival:
    """cp.async.mbarrier.arrive: an arrival when earlier copies of its lanes are over."""

    fills = False
    warp: Warp
    lanes: Lanes
    barrier: MBarrier
    before: list[Grouped]
    count: int
    line: int

    def advance(self) -> bool:
        if any(x.state < DONE for x in self.before):
            return False
        agent = self.warp.clock.agents[COPY]
        given = self.barrier.gathered
        for lane in self.lanes.list:
            given.learn((agent, lane), (self.count, 0, 0))
        if self.lanes.count == 32:
            given.table[SEEN, agent] = max(given.table[SEEN, agent], self.count)
        for x in self.before:
            x.waited[:, self.lanes.index] = True
        self.barrier.pending -= self.lanes.count
        if self.barrier.pending < 0:
            raise Fault(f"mbarrier at {self.barrier.address}: more arrivals of copies than it expects")
        self.barrier.settle(self.line)
        return True


class Groups:
    """Copies of a warp's lanes that groups count, oldest first.

    kinds: what the clock counts when they are FETCHED (0) and DONE (1).
    """

    def __init__(self, warp: Warp, kinds: dict[int, int]) -> None:
        self.warp, self.kinds = warp, kinds
        self.copies: list[Any] = []
        self.committed = np.zeros(32, int)

    def begin(self, lanes: Lanes) -> tuple[int, np.ndarray]:
        """Stamp and group of a new copy."""
        stamps = [self.warp.clock.begin(kind, lanes) for kind in self.kinds.values()]
        return stamps[0], np.where(lanes.mask, 0, -1)

    def commit(self, lanes: Lanes) -> None:
        self.committed[lanes.index] += 1
        for copy in self.copies:
            mine = (copy.group == 0) & lanes.mask
            copy.group[mine] = self.committed[mine]
        for kind in self.kinds.values():
            self.warp.clock.commit(kind)

    def wait(self, lanes: Lanes, left: int | None, state: int, what: str) -> Wait:
        """For all groups of the lanes but the last `left`; None: also for copies that are not committed."""
        if left is None:
            due = [(x, (x.group >= 0) & lanes.mask) for x in self.copies]
        else:
            last = self.committed - left
            due = [(x, (x.group > 0) & (x.group <= last) & lanes.mask) for x in self.copies]
        due = [(x, mine) for x, mine in due if mine.any()]

        levels = state - FETCHED + 1

        def then() -> None:
            for copy, mine in due:
                copy.waited[:levels, mine] = True
            for level, kind in self.kinds.items():
                if level < levels:
                    self._finish(kind, level, lanes)
            self.copies = [x for x in self.copies if ((x.group >= 0) & ~x.waited[1]).any()]

        return Wait(lambda: all(x.state >= state for x, _ in due), then, what)

    def _finish(self, kind: int, level: int, lanes: Lanes) -> None:
        clock = self.warp.clock
        open_ = [(x.stamp, (x.group >= 0) & ~x.waited[level]) for x in self.copies]
        for lane in lanes.list:
            if clock.busy[kind, lane]:
                first = next((stamp for stamp, mine in open_ if mine[lane]), None)
                clock.finish(kind, lane, clock.count[kind] if first is None else first - 1, first is None)


class LaneCopies:
    """A warp's copies that groups count: bulk stores, and cp.async."""

    def __init__(self, warp: Warp) -> None:
        self.stores = Groups(warp, {0: READ, 1: WRITE})
        self.small = Groups(warp, {1: COPY})
        self.warp = warp

    def leave(self, lanes: Lanes) -> None:
        """Check copies in flight when lanes exit; see Part."""
        for groups, level in ((self.stores, 0), (self.small, 1)):
            for x in groups.copies:
                if ((x.group >= 0) & ~x.waited[level] & lanes.mask).any():
                    text = "a thread exits without waiting until its copies have used shared memory"
                    self.warp.device.findings.add("exit", text, x.line)


def store(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """cp.async.bulk and cp.async.bulk.tensor from shared to global memory."""
    source = shared_addresses(warp, ins.args[1])
    for lane in lanes.list:
        one = warp.device.lanes_of(lane)
        if "tensor" in ins.parts:
            move = boxed(warp.block, *_map(warp, ins.args[0], lane), int(source[lane]))
        else:
            to, size = warp.addresses(ins.args[0]), warp.get(ins.args[2])
            move = linear(warp.block, int(source[lane]), int(to[lane]), int(size[lane]))
        groups = warp.part(LaneCopies).stores
        stamp, group = groups.begin(one)
        shared, buffer = warp.block.shared, move.buffer
        if shared.shadow:
            g = move.shared_granules(shared.shift)
            shared.shadow.read(g, lane, warp.asynchronous(READ, stamp, True), "bulk store")
        buffer.write(move.used(), move.unit, lane, warp.asynchronous(WRITE, stamp, True), "bulk store")
        move.spoil_global(warp.block)
        new = Store(warp.block, ins.line, stamp, group, move=move)
        groups.copies.append(new)
        warp.block.pending.append(new)
    warp.device.moved()


def small(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """cp.async: 4, 8 or 16 bytes of each lane."""
    at = shared_addresses(warp, ins.args[0])[lanes.index]
    source = warp.addresses(ins.args[1])[lanes.index]
    size = ins.args[2].bits if isinstance(ins.args[2], Imm) else 0
    if size not in (4, 8, 16):
        raise Fault(f"cp.async of {size} bytes: must be 4, 8 or 16")
    if (at % size).any() or (source % size).any():
        raise Fault(f"misaligned: cp.async of {size} bytes")
    kept = np.full(lanes.count, size)
    if len(ins.args) > 3 and "cache_hint" not in ins.op:
        x = ins.args[3]
        kept = warp.get(x, "b32")[lanes.index].astype(int)
        if kept.dtype != bool and warp.get(x).dtype == bool:  # ignore-src
            kept = np.where(kept, 0, size)
        if (kept > size).any():
            raise Fault("cp.async: the source is larger than the copy")
    shared = warp.block.shared
    shared.check(int(at.min()), int(at.max()) + size)
    stamp, group = warp.part(LaneCopies).small.begin(lanes)
    access = warp.asynchronous(COPY, stamp, False)
    shared.write(at, size, lanes.index, access, "cp.async")
    parts = []
    reads = np.flatnonzero(kept)
    for number in np.unique(source[reads] >> 32):
        some = reads[source[reads] >> 32 == number]
        low, high = int(source[some].min()), int((source[some] + kept[some]).max())
        buffer = warp.device.memory.buffer(low, high)
        offsets = source[some] - buffer.base
        buffer.read(offsets, size, lanes.index[some], access, "cp.async")
        parts.append((buffer, some, offsets))
    garbage = warp.device.scheduler.garbage(len(at) * size).reshape(len(at), size)
    shared.bytes[at[:, None] + np.arange(size)] = garbage
    new = Copy(warp.block, ins.line, stamp, group, at=at, size=size, parts=parts, kept=kept)
    warp.part(LaneCopies).small.copies.append(new)
    warp.block.pending.append(new)


def arrive(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """cp.async.mbarrier.arrive."""
    bar = warp.one(shared_addresses(warp, ins.args[0]), lanes)
    found = find_mbarrier(warp, bar, lanes)
    before = [x for x in warp.part(LaneCopies).small.copies if ((x.group >= 0) & lanes.mask).any()]
    if "noinc" not in ins.parts:
        found.pending += lanes.count
    count = warp.clock.commit(COPY)  # later copies are not covered
    warp.block.pending.append(Arrival(warp, lanes, found, before, count, ins.line))


def commit_bulk(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    warp.part(LaneCopies).stores.commit(lanes)


def wait_bulk(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait:
    state = FETCHED if "read" in ins.parts else DONE
    return warp.part(LaneCopies).stores.wait(lanes, _number(ins), state, "bulk stores")


def commit_small(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    warp.part(LaneCopies).small.commit(lanes)


def wait_small(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait:
    left = None if "wait_all" in ins.parts else _number(ins)
    return warp.part(LaneCopies).small.wait(lanes, left, DONE, "cp.async")


def _number(ins: Instruction) -> int:
    [x] = ins.args
    assert isinstance(x, Imm)
    return x.bits


def find(ins: Instruction) -> Operation | None:
    p = ins.parts
    if p[:2] != ("cp", "async") or "multicast::cluster" in p or "im2col" in p:
        return None
    if "bulk" not in p:
        if "mbarrier" in p:
            return arrive
        return commit_small if "commit_group" in p else wait_small if p[2].startswith("wait") else small
    if "commit_group" in p or "wait_group" in p:
        return commit_bulk if "commit_group" in p else wait_bulk
    if "prefetch" in p:
        return lambda warp, ins, lanes: None
    if "bulk_group" in p:
        return store
    return load if any(x.startswith("mbarrier::complete_tx") for x in p) else None
