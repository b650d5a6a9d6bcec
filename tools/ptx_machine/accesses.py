"""Loads, stores and atomics of lanes, and how strong ones order memory.

PTX ISA, "Memory Consistency Model": a release pattern on a place synchronises with an acquire pattern that
reads it; a fence with a relaxed access forms either pattern ("Release and Acquire Patterns").
Read-modify-writes continue a release sequence ("Observation Order").
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.ptx_machine.clocks import Knowledge, Lanes
from tools.ptx_machine.conversions import GENERIC_PARAM, GENERIC_SHARED
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.memory import CTA, GPU, NEVER, UNSIGNED, WEAK, Buffer
from tools.ptx_machine.operands import Mem, Operand, Reg, Sym
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import Operation, Warp

SPACES = ("global", "shared", "param", "const", "local")
ORDERED = ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")


class Place:
    """What releases have given to a place that synchronises. Narrow ones reach their own block only."""

    def __init__(self) -> None:
        self.wide: Knowledge | None = None
        self.narrow: dict[int, Knowledge] = {}
        self.version = 0


class Order:
    """A warp's fences and strong accesses."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.before: dict[
            int, tuple[Knowledge, int]
        ] = {}  # of a lane: what its last releasing fence covers, scope
        self.observed: dict[int, Knowledge] = {}  # of a lane: given by what it read, not yet acquired
        self.looked: dict[tuple[Any, int], int] = {}

    def leave(self, lanes: Lanes) -> None:
        """Note that lanes exit; see Part."""

    def fence(self, lanes: Lanes, acquires: bool, releases: bool, scope: int) -> None:
        warp = self.warp
        if acquires:
            for lane in lanes.list:
                if lane in self.observed:
                    warp.clock.acquire(warp.device.lanes_of(lane), warp.alive, self.observed.pop(lane))
        if releases:
            for lane in lanes.list:
                given = Knowledge(warp.device.agents)
                warp.clock.release(warp.device.lanes_of(lane), warp.alive, given)
                self.before[lane] = given, scope

    def write(self, lane: int, key: Any, releases: bool, scope: int, modify: bool) -> None:
        """A strong write; `modify`: a read-modify-write, which continues earlier release sequences."""
        warp = self.warp
        places = warp.device.places
        given: Knowledge | None = None
        if releases:
            given = Knowledge(warp.device.agents)
            warp.clock.release(warp.device.lanes_of(lane), warp.alive, given)
        elif lane in self.before:
            given, fence_scope = self.before[lane]
            scope = min(scope, fence_scope)
        place = places.get(key)
        if place is None:
            if given is None:
                return
            place = places[key] = Place()
        elif not modify:
            place.wide, place.narrow = None, {}
        place.version += 1
        if given is None:
            return
        block = warp.block.number
        place.narrow.setdefault(block, Knowledge(warp.device.agents)).join(given)
        if scope >= GPU:
            place.wide = place.wide or Knowledge(warp.device.agents)
            place.wide.join(given)

    def read(self, lanes: Lanes, keys: list[Any], acquires: bool, scope: int) -> None:
        warp = self.warp
        for lane, key in zip(lanes.list, keys, strict=True):
            place = warp.device.places.get(key)
            if place is None or self.looked.get((key, lane)) == place.version:
                continue
            self.looked[key, lane] = place.version
            for given in (place.narrow.get(warp.block.number), place.wide if scope >= GPU else None):
                if given is None:
                    continue
                if acquires:
                    warp.clock.acquire(warp.device.lanes_of(lane), warp.alive, given)
                else:
                    self.observed.setdefault(lane, Knowledge(warp.device.agents)).join(given)


def vector(ins: Instruction) -> tuple[int, int]:
    """Bytes of an element, and elements."""
    bits = ins.parts[-1]
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    return int(bits.lstrip("busf").split("x")[0]) * (2 if bits.endswith("x2") else 1) // 8, count


def space_of(ins: Instruction) -> str:
    for part in ins.parts[1:]:
        if (name := part.split(":")[0]) in SPACES:
            return name
    return "generic"


def strength(ins: Instruction, default: int = WEAK) -> int:
    """The strength of an access: WEAK, or its scope."""
    if "volatile" in ins.parts or "sys" in ins.parts or "gpu" in ins.parts or "cluster" in ins.parts:
        return GPU
    if "cta" in ins.parts:
        return CTA
    return GPU if any(p in ins.parts for p in ORDERED) else default


def resolve(ins: Instruction, at: np.ndarray) -> tuple[str, np.ndarray]:
    """The space of an access and its addresses in that space."""
    space = space_of(ins)
    if space == "generic":
        if at[0] >= GENERIC_SHARED:
            space, at = "shared", at - GENERIC_SHARED
        else:
            space = "param" if at[0] >= GENERIC_PARAM else "global"
    return space, at


def aligned(at: np.ndarray, size: int, what: str) -> None:
    if (at & (size - 1)).any():
        bad = int(at[(at & (size - 1)) != 0][0])
        raise Fault(f"misaligned: {what} of {size} bytes at {bad:#x}")


def _cells(at: np.ndarray, width: int, count: int) -> Any:
    """Index of [lanes] or [lanes, count] elements."""
    first = at // width
    return first if count == 1 else first[:, None] + np.arange(count)


def _buffers(warp: Warp, at: np.ndarray, size: int) -> list[tuple[Buffer, Any]]:
    """The arrays that lanes access, and which lanes."""
    low, high = int(at.min()), int(at.max())
    if low >> 32 == high >> 32:
        return [(warp.device.memory.buffer(low, high + size), slice(None))]
    out = []
    for number in np.unique(at >> 32):
        some = np.flatnonzero(at >> 32 == number)
        part = at[some]
        out.append((warp.device.memory.buffer(int(part.min()), int(part.max()) + size), some))
    return out


def load(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "ld"."""
    (width, count), mem = vector(ins), ins.args[1]
    targets = ins.args[0] if isinstance(ins.args[0], tuple) else (ins.args[0],)
    assert isinstance(mem, Mem)
    if isinstance(mem.base, Sym) and space_of(ins) == "param":
        value = warp.device.parameter(mem.base.name, mem.base.offset + mem.offset, width)
        for i, target in enumerate(targets):
            if isinstance(target, Reg):
                part = value >> (8 * width * i) & ((1 << 8 * width) - 1)
                warp.set(target, np.full(32, part, warp.kind(target)), lanes)
        return
    space, at = resolve(ins, warp.addresses(mem)[lanes.index])
    aligned(at, width * count, "load")
    strong = strength(ins)
    raw = np.empty((lanes.count, count), UNSIGNED[width])
    if space == "shared":
        shared = warp.block.shared
        shared.check(int(at.min()), int(at.max()) + width * count)
        shared.read(at, width * count, lanes.index, warp.access(strong), "load")
        raw[:] = shared.view[width][_cells(at, width, count)].reshape(raw.shape)
    elif space == "global":
        for buffer, some in _buffers(warp, at, width * count):
            offset = at[some] - buffer.base
            buffer.read(offset, width * count, lanes.index[some], warp.access(strong), "load")
            raw[some] = buffer.view[width][_cells(offset, width, count)].reshape(-1, count)
    else:
        raise NotImplementedError(f"{ins}: loads from {space} memory")
    if strong:
        owner = warp.block.number if space == "shared" else -1
        warp.part(Order).read(lanes, [(owner, x) for x in at.tolist()], "acquire" in ins.parts, strong)
        warp.spins = True
    for i, target in enumerate(targets):
        if isinstance(target, Reg):
            loaded = widen(raw[:, i], ins.parts[-1], warp.kind(target))
            if lanes.count < 32:
                full = np.zeros(32, loaded.dtype)
                full[lanes.index] = loaded
                loaded = full
            warp.set(target, np.ascontiguousarray(loaded), lanes)


def widen(raw: np.ndarray, t: str, kind: Any) -> np.ndarray:
    """A loaded number in a register that may be wider: signed ones keep their sign (PTX ISA, "ld")."""
    if raw.dtype == kind:
        return raw
    if t[0] == "s":
        signed = np.ascontiguousarray(raw).view(f"i{raw.itemsize}")
        return signed.astype(f"i{np.dtype(kind).itemsize}").view(kind)
    return raw.astype(kind)


def store(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "st"."""
    width, count = vector(ins)
    space, at = resolve(ins, warp.addresses(ins.args[0])[lanes.index])
    aligned(at, width * count, "store")
    values = ins.args[1] if isinstance(ins.args[1], tuple) else (ins.args[1],)
    columns = [warp.get(v, f"b{8 * width}")[lanes.index].astype(UNSIGNED[width]) for v in values]
    raw = columns[0] if count == 1 else np.stack(columns, 1)
    strong = strength(ins)
    if space == "shared":
        shared = warp.block.shared
        shared.check(int(at.min()), int(at.max()) + width * count)
        shared.write(at, width * count, lanes.index, warp.access(strong), "store")
        _put(warp, shared.view[width], _cells(at, width, count), raw, "shared memory")
    elif space == "global":
        for buffer, some in _buffers(warp, at, width * count):
            offset = at[some] - buffer.base
            cells = _cells(offset, width, count)
            same = not strong and bool((buffer.view[width][cells] == raw[some]).all())
            who = lanes.index[some]
            buffer.write(offset, width * count, who, warp.access(strong), "store", same)
            _put(warp, buffer.view[width], cells, raw[some], buffer.name)
    else:
        raise NotImplementedError(f"{ins}: stores to {space} memory")
    if strong:
        owner = warp.block.number if space == "shared" else -1
        for lane, x in zip(lanes.list, at.tolist(), strict=True):
            warp.part(Order).write(lane, (owner, x), "release" in ins.parts, strong, modify=False)
    warp.device.moved()


def _put(warp: Warp, view: np.ndarray, cells: np.ndarray, raw: np.ndarray, name: str) -> None:
    view[cells] = raw
    if (view[cells] != raw).any():
        warp.device.note("race", f"lanes of one store write different values to one place of {name}")


INTEGER: dict[str, Callable[[int, list[int], int], int]] = {
    "add": lambda old, x, top: old + x[0],
    "exch": lambda old, x, top: x[0],
    "cas": lambda old, x, top: x[1] if old == x[0] else old,
    "max": lambda old, x, top: max(old, x[0]),
    "min": lambda old, x, top: min(old, x[0]),
    "and": lambda old, x, top: old & x[0],
    "or": lambda old, x, top: old | x[0],
    "xor": lambda old, x, top: old ^ x[0],
    "inc": lambda old, x, top: 0 if old >= x[0] else old + 1,
    "dec": lambda old, x, top: x[0] if old == 0 or old > x[0] else old - 1,
}


def atomic(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "atom" and "red": relaxed and of gpu scope if nothing is said."""
    fetches = ins.parts[0] == "atom"
    target: Operand = ins.args[0] if fetches else None
    mem, *operands = ins.args[1:] if fetches else ins.args
    width, count = vector(ins)
    t = ins.parts[-1]
    op = next((p for p in ins.parts if p in INTEGER), "")
    if count != 1 or not op or (t[0] == "f" and (op, t) != ("add", "f32")):
        raise NotImplementedError(str(ins))
    space, at = resolve(ins, warp.addresses(mem)[lanes.index])
    aligned(at, width, "atomic")
    given = [warp.get(x, f"b{8 * width}") for x in operands]
    scope = strength(ins, GPU)
    acquires = "acquire" in ins.parts or "acq_rel" in ins.parts
    releases = "release" in ins.parts or "acq_rel" in ins.parts
    result = np.zeros(32, UNSIGNED[width])
    bits, changed = 8 * width, False
    for lane, place in zip(lanes.list, at.tolist(), strict=True):
        if space == "shared":
            memory: Any = warp.block.shared
            memory.check(place, place + width)
            cell, owner = place, warp.block.number
        else:
            memory = warp.device.memory.buffer(place, place + width)
            cell, owner = place - memory.base, -1
        shadow = memory.shadow
        if shadow and shadow.writers[cell >> memory.shift] == NEVER:
            warp.device.note("uninitialised", f"atomic reads {shadow.name} that nothing has written")
        memory.write(np.array([cell]), width, lane, warp.access(scope), "atomic")
        view = memory.view[width]
        old = int(view[cell // width])
        numbers = [int(v[lane]) for v in given]
        if t[0] == "s":
            sign = 1 << (bits - 1)
            new = INTEGER[op]((old ^ sign) - sign, [(v ^ sign) - sign for v in numbers], bits)
        elif t == "f32":
            summed = np.float32(_float(old)) + np.float32(_float(numbers[0]))
            new = int(summed.view(np.uint32))
        else:
            new = INTEGER[op](old, numbers, bits)
        view[cell // width] = new & ((1 << bits) - 1)
        changed |= old != new or op != "cas"
        result[lane] = old
        one = warp.device.lanes_of(lane)
        warp.part(Order).read(one, [(owner, place)], acquires, scope)
        warp.part(Order).write(lane, (owner, place), releases, scope, modify=True)
    if changed:
        warp.device.moved()
    else:
        warp.spins = True
    if isinstance(target, Reg):
        warp.set(target, widen(result, t, warp.kind(target)), lanes)


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def prefetch(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "prefetch": a hint; a tensor map must exist."""
    if "tensormap" in ins.parts:
        for address in warp.addresses(ins.args[0])[lanes.index].tolist():
            warp.device.tensor_map(address)


OPERATIONS: dict[str, Operation] = {
    "ld": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "prefetch": prefetch,
    "applypriority": lambda warp, ins, lanes: None,
}


def find(ins: Instruction) -> Operation | None:
    if ins.parts[0] == "red" and "async" in ins.parts:
        return None
    return OPERATIONS.get(ins.parts[0])
