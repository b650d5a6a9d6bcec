"""Tensor memory, and the instructions of the fifth generation of tensor cores (tcgen05), of one block.

PTX ISA, "Tensor Memory" and "TensorCore 5th Generation Family Instructions". Tensor memory has 128 lanes of
512 columns of 32 bits; a warp reaches a quarter of the lanes. A product happens at any time from its start
until the mbarrier of a tcgen05.commit knows of it; only products of one thread with the same accumulator and
shape happen in order. A store happens until tcgen05.wait::st. What other threads did there is known
after tcgen05.fence::before_thread_sync there, a synchronisation, and tcgen05.fence::after_thread_sync here.

A load fills its registers at once, although the ISA has them filled only by tcgen05.wait::ld: Mosaic leaves
that order to ptxas. Until then, what was loaded must not be overwritten. Nor does Mosaic set the constant
bits 46 to 48 of matrix descriptors, which are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.ptx_machine import fragments
from tools.ptx_machine.barriers import MBarrier, find_mbarrier, shared_addresses
from tools.ptx_machine.clocks import SEEN, TENSOR, TENSOR_READ, TENSOR_WRITE, Knowledge, Lanes
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.operands import Imm, Mem, Operand
from tools.ptx_machine.products import add, times
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import Operation, Wait, Warp

LANES, COLUMNS, QUARTERS = 128, 512, 4
# of a kind of product: types of its operands and of its accumulator by their numbers in a descriptor
KINDS: dict[str, tuple[dict[int, str], dict[int, Any]]] = {
    "kind::f16": ({0: "f16", 1: "bf16"}, {1: np.float32}),
    "kind::f8f6f4": ({0: "e4m3", 1: "e5m2"}, {1: np.float32}),
    "kind::i8": ({0: "u8", 1: "s8"}, {2: np.int32}),
}
DEPTH = 32  # bytes of a row of an operand, eight columns of tensor memory

type Place = tuple[slice, slice]  # quarters of the lanes, and columns
type Shape = tuple[int, int, int]  # of a product: its accumulator, columns, instruction descriptor


class TensorMemory:
    """A block's tensor memory, and who read and wrote it last.

    Attributes:
        cells: [LANES, COLUMNS].
        allocated: number of columns, by the first.
        final: no warp may allocate any more.
        writers: agent and count of the last write [QUARTERS, COLUMNS, 2]; agent -1: none. lines: its line.
        readers: by agent, count and line of its last read since then [QUARTERS, COLUMNS, 2].
        flying: products that are not performed.
    """

    def __init__(self, warp: Warp) -> None:
        garbage = warp.device.scheduler.garbage(LANES * COLUMNS * 4)
        self.cells = garbage.view(np.uint32).reshape(LANES, COLUMNS)
        self.allocated: dict[int, int] = {}
        self.final = False
        self.writers = np.full((QUARTERS, COLUMNS, 2), -1, np.int64)
        self.lines = np.zeros((QUARTERS, COLUMNS), np.int64)
        self.readers: dict[int, np.ndarray] = {}
        self.flying: list[Product] = []

    def check(self, first: int, columns: int) -> None:
        """Columns must be allocated."""
        if not any(at <= first and first + columns <= at + n for at, n in self.allocated.items()):
            text = f"columns {first} to {first + columns - 1} of tensor memory are not allocated"
            raise Fault(f"out of bounds: {text}")


def memory_of(warp: Warp) -> TensorMemory:
    if warp.block.tensor is None:
        warp.block.tensor = TensorMemory(warp)
    found: TensorMemory = warp.block.tensor
    return found


@dataclass(eq=False)
class Product:
    """A tcgen05.mma.

    Attributes:
        chain: products of the thread with the same accumulator and shape, in order.
        d: first column of the accumulator; n: its columns; dtype: of its numbers.
    """

    memory: TensorMemory
    chain: list[Product]
    d: int
    n: int
    dtype: Any
    a: Any
    b: Any
    keeps: bool
    line: int
    done: bool = False
    fills: bool = False

    def perform(self) -> None:
        """Performs the first of its chain."""
        first = self.chain.pop(0)
        at = (slice(None), slice(first.d, first.d + first.n))
        before = first.memory.cells[at].view(first.dtype) if first.keeps else None
        result = add(before, times(first.a(), first.b()), first.dtype)
        first.memory.cells[at] = np.ascontiguousarray(result).view(np.uint32)
        first.done = True
        first.memory.flying.remove(first)

    def advance(self) -> bool:
        if not self.done:
            self.perform()
        return self.done


@dataclass(eq=False)
class Commit:
    """A tcgen05.commit: an arrival at an mbarrier when earlier products of its thread are over."""

    products: list[Product]
    barrier: MBarrier
    known: Knowledge
    agent: int
    count: int
    line: int
    fills: bool = False

    def advance(self) -> bool:
        if (left := next((x for x in self.products if not x.done), None)) is not None:
            left.perform()
            return False
        if not self.barrier.pending:
            raise Fault(f"mbarrier at {self.barrier.address}: more arrivals than it expects")
        self.barrier.started.join(self.known)
        known = self.barrier.gathered.table
        known[:, self.agent] = np.maximum(known[:, self.agent], self.count)
        self.barrier.pending -= 1
        self.barrier.settle(self.line)
        return True


@dataclass(eq=False)
class Store:
    """A tcgen05.st of a warp: values [32, n]."""

    memory: TensorMemory
    at: Place
    values: np.ndarray
    line: int
    done: bool = False
    fills: bool = False

    def advance(self) -> bool:
        self.memory.cells[self.at] = self.values
        self.done = True
        return True


@dataclass
class Tensor:
    """What a warp did to tensor memory, and what its lanes know of others.

    Attributes:
        products: by lane. chains: of products, by lane, accumulator and shape. shapes: of products, by count.
        now: count that loads and stores carry, by kind; over: up to which count waits have covered them.
        stores: not covered.
        seen: by lane, counts of all agents at its last tcgen05.fence::after_thread_sync.
    """

    warp: Warp
    products: dict[int, list[Product]] = field(default_factory=dict)
    chains: dict[tuple[int, int, int], list[Product]] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    now: dict[int, int] = field(default_factory=lambda: {TENSOR_READ: 1, TENSOR_WRITE: 1})
    over: dict[int, int] = field(default_factory=lambda: {TENSOR_READ: 0, TENSOR_WRITE: 0})
    stores: list[Store] = field(default_factory=list)
    seen: dict[int, np.ndarray] = field(default_factory=dict)

    def leave(self, lanes: Lanes) -> None:
        if self.warp.done and any(not store.done for store in self.stores):
            self.warp.device.note("exit", "a warp exits while its tcgen05.st is in flight")

    def wait(self, kind: int) -> None:
        """A wait has covered the warp's loads or stores."""
        self.over[kind] = self.now[kind]
        self.now[kind] += 1

    def knows(self, lane: int, agent: int, count: int) -> bool:
        kinds = self.warp.clock.kind_of
        if (kind := kinds.get(agent)) in self.over and self.over[kind] >= count:
            return True
        seen = self.seen.get(lane)
        return seen is not None and bool(seen[agent] >= count)

    # --- who accesses what

    def read(self, lane: int, at: Place, kind: int, count: int, what: str) -> None:
        if not self.warp.device.log:
            return
        self._after_writes(lane, at, None, f"{what} reads tensor memory that")
        readers = memory_of(self.warp).readers
        agent = self.warp.clock.agents[kind]
        if agent not in readers:
            readers[agent] = np.zeros((QUARTERS, COLUMNS, 2), np.int64)
        readers[agent][at] = count, self.warp.line

    def write(
        self,
        lane: int,
        at: Place,
        kind: int,
        count: int,
        what: str,
        shape: Shape | None = None,
    ) -> None:
        """shape: of a product; it comes after others of its shape."""
        if not self.warp.device.log:
            return
        memory = memory_of(self.warp)
        self._after_writes(lane, at, shape, f"{what} overwrites what")
        for agent, last in memory.readers.items():
            for seen, line in _distinct(last[at]):
                if seen and not self.knows(lane, agent, seen):
                    self._note("race", f"{what} overwrites what may still be read from tensor memory", line)
            last[at] = 0
        memory.writers[at] = self.warp.clock.agents[kind], count
        memory.lines[at] = self.warp.line

    def _after_writes(self, lane: int, at: Place, shape: Shape | None, what: str) -> None:
        memory, mine = memory_of(self.warp), self.warp.clock.agents[TENSOR]
        stacked = np.concatenate([memory.writers[at], memory.lines[at][..., None]], -1)
        for agent, count, line in _distinct(stacked):
            if agent < 0:
                if shape is None and "reads" in what:
                    self._note("uninitialised", f"{what} nothing has written", 0)
                continue
            in_order = agent == mine and shape is not None and self.shapes[count - 1] == shape
            if not in_order and not self.knows(lane, agent, count):
                self._note("race", f"{what} may not be written yet", line)

    def _note(self, kind: str, text: str, line: int) -> None:
        self.warp.device.findings.add(kind, text, self.warp.line, line)


def _distinct(rows: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Different rows of the last axis."""
    flat = rows.reshape(-1, rows.shape[-1])
    if (flat == flat[0]).all():
        flat = flat[:1]
    yield from {tuple(row) for row in flat.tolist()}


# --- operations


def allocate(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """tcgen05.alloc: writes the address to shared memory."""
    if wait := warp.together(lanes):
        return wait
    memory, n = memory_of(warp), warp.one(warp.get(ins.args[1]), lanes)
    if n not in (32, 64, 128, 256, 512):
        raise Fault(f"tcgen05.alloc of {n} columns: a power of two from 32 to 512")
    if memory.final:
        raise Fault("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
    first = sum(memory.allocated.values())
    if first + n > COLUMNS:
        raise Fault(f"deadlock: tcgen05.alloc of {n} columns, {COLUMNS - first} are free")
    memory.allocated[first] = n
    shared, at = warp.block.shared, shared_addresses(warp, ins.args[0])[lanes.index[:1]]
    shared.check(int(at[0]), int(at[0]) + 4)
    shared.write(at, 4, lanes.list[0], warp.access(), "tcgen05.alloc")
    shared.view[4][at >> 2] = first
    warp.device.moved()
    return None


def deallocate(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    memory = memory_of(warp)
    first, n = (warp.one(warp.get(x), lanes) for x in ins.args)
    if memory.allocated.get(first) != n:
        raise Fault(f"tcgen05.dealloc of {n} columns from {first} on, which were not allocated like this")
    if memory.flying:
        warp.device.note("race", "tcgen05.dealloc while a product is in flight", memory.flying[0].line)
    del memory.allocated[first]
    return None


def relinquish(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    memory_of(warp).final = True
    return None


def fence(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """Makes known what waits have covered, or takes note of what is known."""
    mine = warp.part(Tensor)
    if ins.parts[1] == "fence::before_thread_sync":
        for kind, count in mine.over.items():
            warp.clock.finish_all(kind, count)
    else:
        for lane in lanes.list:
            mine.seen[lane] = warp.clock.of(lane).table[SEEN].copy()
    return None


def _place(warp: Warp, ins: Instruction, x: Operand, count: int) -> tuple[Place, Place]:
    """Lanes and columns of a load or store, and the same with the quarter of the lanes."""
    if "32x32b" not in ins.parts or "b32" not in ins.parts or len(ins.parts) != 7:
        raise NotImplementedError(str(ins))
    address = warp.one(warp.addresses(x), warp.alive)
    lane, column, quarter = address >> 16, address & 0xFFFF, warp.number % QUARTERS
    if lane not in (0, 32 * quarter):  # Mosaic names the first lane for all warps
        raise Fault(f"a warp has lanes {32 * quarter} and on, not {lane}, of tensor memory")
    memory_of(warp).check(column, count)
    columns = slice(column, column + count)
    return (slice(32 * quarter, 32 * quarter + 32), columns), (slice(quarter, quarter + 1), columns)


def load(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    targets = ins.args[0] if isinstance(ins.args[0], tuple) else (ins.args[0],)
    at, quarters = _place(warp, ins, ins.args[1], len(targets))
    mine = warp.part(Tensor)
    mine.read(lanes.list[0], quarters, TENSOR_READ, mine.now[TENSOR_READ], "tcgen05.ld")
    values = np.ascontiguousarray(memory_of(warp).cells[at].T)
    for target, value in zip(targets, values, strict=True):
        warp.set(target, value, lanes)
    return None


def store(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    sources = ins.args[1] if isinstance(ins.args[1], tuple) else (ins.args[1],)
    at, quarters = _place(warp, ins, ins.args[0], len(sources))
    mine = warp.part(Tensor)
    mine.write(lanes.list[0], quarters, TENSOR_WRITE, mine.now[TENSOR_WRITE], "tcgen05.st")
    values = np.stack([warp.get(x) for x in sources], 1)
    mine.stores.append(Store(memory_of(warp), at, values, ins.line))
    warp.block.pending.append(mine.stores[-1])
    return None


def wait_for(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    mine = warp.part(Tensor)
    if ins.parts[1] == "wait::ld":
        mine.wait(TENSOR_READ)
        return None
    due, mine.stores = mine.stores, []

    def then() -> None:
        mine.wait(TENSOR_WRITE)

    return Wait(lambda: all(x.done for x in due), then, "stores to tensor memory")


def multiply(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """tcgen05.mma, by one thread."""
    if ins.parts[2:3] != ("cta_group::1",) or ins.parts[-1] not in KINDS or len(ins.args) != 5:
        raise NotImplementedError(str(ins))
    if lanes.count != 1:
        raise Fault(f"{lanes.count} threads execute tcgen05.mma at once, each of them a product")
    [lane] = lanes.list
    form = warp.one(warp.get(ins.args[3]), lanes)
    m, n = (form >> 24 & 31) << 4, (form >> 17 & 63) << 3
    kinds, dtypes = KINDS[ins.parts[-1]]
    if m != LANES or form & 0x6000_600F or form >> 4 & 3 not in dtypes:
        raise NotImplementedError(f"{ins}: instruction descriptor {form:#x}")
    if n % 16 or not 16 <= n <= 256:
        raise Fault(f"tcgen05.mma with {n} columns: a multiple of 16 up to 256")
    a_kind, b_kind = kinds[form >> 7 & 7], kinds[form >> 10 & 7]
    size = fragments.BITS[a_kind] // 8
    memory, mine, clock, shared = memory_of(warp), warp.part(Tensor), warp.clock, warp.block.shared
    d = warp.one(warp.addresses(ins.args[0]), lanes)
    clock.count[TENSOR] += 1
    count = clock.count[TENSOR]
    access = warp.asynchronous(TENSOR, count, True)
    every = slice(0, QUARTERS)

    def operand(x: Operand, rows: int, flipped: bool, kind: str, name: str) -> Any:
        bits = warp.one(warp.get(x, "b64"), lanes)
        at, granules = warp.device.tile(bits, 0, rows, DEPTH // size, size, flipped, shared)
        if shared.shadow:
            shared.shadow.read(granules, lane, access, f"tcgen05.mma's {name}", "uninitialised operand")
        return lambda: fragments.decode(shared.view[size][at], kind)

    shape = d, n, form
    mine.shapes.append(shape)
    b = operand(ins.args[2], n, bool(form >> 16 & 1), b_kind, "B")
    if isinstance(ins.args[1], Mem):
        first = warp.one(warp.addresses(ins.args[1]), lanes)
        memory.check(first, DEPTH // 4)
        mine.read(lane, (every, slice(first, first + DEPTH // 4)), TENSOR, count, "tcgen05.mma")

        def a() -> np.ndarray:
            words = np.ascontiguousarray(memory.cells[:, first : first + DEPTH // 4])
            return fragments.decode(words.view(f"u{size}"), a_kind)
    else:
        a = operand(ins.args[1], m, bool(form >> 15 & 1), a_kind, "A")
    memory.check(d, n)
    at = every, slice(d, d + n)
    flag = ins.args[4]
    keeps = bool(flag.bits) if isinstance(flag, Imm) else bool(warp.one(warp.get(flag, "p"), lanes))
    mine.write(lane, at, TENSOR, count, "tcgen05.mma", shape)
    chain = mine.chains.setdefault((lane, d, n), [])
    product = Product(memory, chain, d, n, dtypes[form >> 4 & 3], a, b, keeps, ins.line)
    chain.append(product)
    memory.flying.append(product)
    mine.products.setdefault(lane, []).append(product)
    warp.block.pending.append(product)
    return None


def commit(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if ins.parts[2:4] != ("cta_group::1", "mbarrier::arrive::one") or lanes.count != 1:
        raise NotImplementedError(str(ins))
    [lane] = lanes.list
    mine = warp.part(Tensor)
    barrier = find_mbarrier(warp, int(shared_addresses(warp, ins.args[0])[lane]), lanes)
    products = [x for x in mine.products.pop(lane, []) if not x.done]
    known, agent, count = Knowledge(warp.device.agents), warp.clock.agents[TENSOR], warp.clock.count[TENSOR]
    warp.clock.release(lanes, warp.alive, known)
    warp.block.pending.append(Commit(products, barrier, known, agent, count, ins.line))
    return None


OPERATIONS: dict[str, Operation] = {
    "alloc": allocate,
    "dealloc": deallocate,
    "relinquish_alloc_permit": relinquish,
    "mma": multiply,
    "commit": commit,
    "ld": load,
    "st": store,
    "wait::ld": wait_for,
    "wait::st": wait_for,
    "fence::before_thread_sync": fence,
    "fence::after_thread_sync": fence,
}


def find(ins: Instruction) -> Operation | None:
    return OPERATIONS.get(ins.parts[1]) if ins.parts[0] == "tcgen05" else None
