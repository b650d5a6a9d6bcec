"""Matrix products of warpgroups (wgmma) and warps (mma.sync), ldmatrix and stmatrix.

PTX ISA, "Asynchronous warpgroup level matrix instructions" and "Warp level matrix instructions". A wgmma
happens at any time from its start to the wgmma.wait_group that covers it; until then its accumulator holds
garbage. Its warps have 16 rows each and are independent here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx_machine import fragments
from tools.ptx_machine.barriers import shared_addresses
from tools.ptx_machine.clocks import MANY, WGMMA, Lanes
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.operands import Imm, Operand, Reg
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import Operation, Wait, Warp

TYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "s32": np.int32}
SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def shape_of(ins: Instruction) -> tuple[tuple[int, int, int], tuple[str, ...]]:
    """m, n and k, and the types that follow."""
    at = next(i for i, p in enumerate(ins.parts) if SHAPE.fullmatch(p))
    found = SHAPE.fullmatch(ins.parts[at])
    assert found is not None
    return (int(found[1]), int(found[2]), int(found[3])), ins.parts[at + 1 :]


@dataclass(frozen=True)
class Plan:
    """What a wgmma.mma_async says, decoded once.

    Attributes:
        d: registers of the accumulator. a: those of A, or None if a descriptor names it in memory.
        keeps: whether the product is added to the accumulator; None: a predicate decides.
        flipped: whether A and B are MN-major.
    """

    d: tuple[int, ...]
    a: tuple[int, ...] | None
    n: int
    k: int
    kinds: tuple[str, str, str]
    scale: float
    keeps: bool | None
    flipped: tuple[bool, bool]

    @classmethod
    def of(cls, ins: Instruction, index: dict[str, int]) -> Plan:
        (_, n, k), (dtype, a_kind, b_kind) = shape_of(ins)
        bits = fragments.BITS
        if a_kind not in bits or bits[a_kind] != bits.get(b_kind) or bits[a_kind] > 16:
            raise NotImplementedError(str(ins))
        d, a, _, keeps, *rest = ins.args
        assert isinstance(d, tuple)
        flags = [x.bits for x in rest if isinstance(x, Imm)]
        signs, flipped = ([1, 1], []) if dtype == "s32" else ([*flags, 1, 1][:2], flags[2:])
        return cls(
            tuple(index[r.name] for r in d if isinstance(r, Reg)),
            tuple(index[r.name] for r in a if isinstance(r, Reg)) if isinstance(a, tuple) else None,
            n,
            k,
            (dtype, a_kind, b_kind),
            float(signs[0] * signs[1]),
            bool(keeps.bits) if isinstance(keeps, Imm) else None,
            (len(flipped) == 2 and bool(flipped[0]), bool(flipped and flipped[-1])),
        )


@dataclass(eq=False)
class Product:
    """A wgmma of a warp.

    Attributes:
        d: registers of the accumulator; a, b: how to read the operands.
        held: registers of A with what they held at the start.
        scale: of the product: 1 or -1. keeps: it adds to the accumulator.
    """

    d: tuple[int, ...]
    a: Any
    b: Any
    held: list[tuple[int, Any]]
    scale: float
    keeps: bool
    line: int
    done: bool = False


@dataclass(eq=False)
class Accumulator:
    """In flight: its matrix [16, n], and the garbage that its registers hold."""

    matrix: np.ndarray
    garbage: np.ndarray
    packed: bool


class Products:
    """A warp's products of warpgroups."""

    fills = False

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.queue: list[Product] = []  # not performed
        self.open: list[Product] = []
        self.groups: list[list[Product]] = []
        self.flying: dict[tuple[int, ...], Accumulator] = {}

    def start(self, product: Product, dtype: Any, packed: bool) -> None:
        warp, d = self.warp, product.d
        if d not in self.flying:
            if not warp.owned.isdisjoint(d):
                warp.device.note("race", "accumulators of wgmma in flight overlap")
            registers = [warp.R[i] for i in d]
            matrix = fragments.accumulators(registers, dtype, packed)
            garbage = warp.device.scheduler.garbage(128).view(np.uint32)
            self.flying[d] = Accumulator(matrix, garbage, packed)
            for i in d:
                warp.R[i] = garbage
            warp.owned.update(d)
        self.open.append(product)
        self.queue.append(product)
        warp.block.pending.append(self)

    @property
    def line(self) -> int:
        """The line of the oldest product that is not performed."""
        return self.queue[0].line

    def advance(self) -> bool:
        """Performs the oldest."""
        x = self.queue.pop(0)
        flying = self.flying[x.d]
        a, b = x.a(), x.b()
        product = times(a, b)
        if x.scale != 1:
            product = product * np.float32(x.scale)
        for i, value in x.held:
            if self.warp.R[i] is not value:
                text = "a register of a wgmma's A changes before the product is over"
                self.warp.device.findings.add("race", text, x.line)
        flying.matrix = add(flying.matrix if x.keeps else None, product, flying.matrix.dtype)
        x.done = True
        return True

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []
        self.warp.clock.commit(WGMMA)

    def wait(self, left: int) -> Wait:
        warp = self.warp
        due = self.groups[: max(len(self.groups) - left, 0)]
        count = warp.clock.count[WGMMA] - min(left, len(self.groups))

        def then() -> None:
            self.groups = self.groups[len(due) :]
            warp.clock.finish_all(WGMMA, count)
            busy = {x.d for group in (*self.groups, self.open) for x in group}
            for d in [d for d in self.flying if d not in busy]:
                flying = self.flying.pop(d)
                for i, value in zip(d, fragments.results(flying.matrix, flying.packed), strict=True):
                    if warp.R[i] is not flying.garbage:
                        warp.device.note(
                            "race", "a register of an accumulator changes before the product is over"
                        )
                    warp.R[i] = value
                    warp.owned.discard(i)

        last = next((group[-1] for group in reversed(due) if group), None)  # they are done in order
        return Wait(lambda: last is None or last.done, then, "products of the warpgroup")

    def leave(self, lanes: Lanes) -> None:
        """Check products in flight when lanes exit; see Part."""
        if self.warp.done and self.flying:
            self.warp.device.note("exit", "a warp exits while its wgmma is in flight")


def times(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left @ right.T of float32 numbers of at most 16 bits.

    In float64, sums are exact unless their terms differ very much. In float32, they depend on a row's place,
    since BLAS computes the rows at a matrix's edge differently.
    """
    product: np.ndarray = left.astype(np.float64) @ right.T.astype(np.float64)
    return product.astype(np.float32)


def add(c: np.ndarray | None, product: np.ndarray, dtype: Any) -> np.ndarray:
    """C + A B. Integers wrap; a warp's float32 sums are rounded once for each K of an instruction."""
    if dtype == np.int32:
        total = product.astype(np.int64) + (0 if c is None else c)
        return (total & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    total = product if c is None else c.astype(np.float32) + product
    out: np.ndarray = total.astype(dtype)
    return out


def wgmma_fence(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """wgmma.fence: whether it is where it must be is checked without execution."""
    return warp.together(lanes)


def multiply_async(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """wgmma.mma_async."""
    if wait := warp.together(lanes):
        return wait
    plan = warp.device.plans.get(ins.line)
    if plan is None:
        plan = warp.device.plans[ins.line] = Plan.of(ins, warp.program.index)
    dtype, a_kind, b_kind = plan.kinds
    item = fragments.BITS[a_kind] // 8
    memory = warp.block.shared.view[item]
    access = warp.asynchronous(WGMMA, warp.clock.count[WGMMA] + 1, True)

    def operand(x: Operand, first: int, rows: int, flipped: bool, kind: str, name: str) -> Any:
        bits = warp.one(warp.get(x, "b64"), lanes)
        at, g = warp.device.tile(bits, first, rows, plan.k, item, flipped, warp.block.shared)
        shadow = warp.block.shared.shadow
        if shadow:
            shadow.read(g, MANY, access, f"wgmma's {name}", "uninitialised operand")
        return lambda: fragments.decode(memory[at], kind)

    b = operand(ins.args[2], 0, plan.n, plan.flipped[1], b_kind, "B")
    held: list[tuple[int, Any]] = []
    if (registers := plan.a) is not None:
        held = [(i, warp.R[i]) for i in registers]

        def a() -> np.ndarray:
            return fragments.operand([warp.R[i] for i in registers], a_kind, 16)
    else:
        a = operand(ins.args[1], 16 * (warp.number % 4), 16, plan.flipped[0], a_kind, "A")
    keeps = plan.keeps
    if keeps is None:
        keeps = bool(warp.one(warp.get(ins.args[3], "p"), lanes))
    product = Product(plan.d, a, b, held, plan.scale, keeps, ins.line)
    warp.part(Products).start(product, TYPES[dtype], dtype == "f16")
    return None


def commit(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    warp.part(Products).commit()
    return None


def wait_group(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    if wait := warp.together(lanes):
        return wait
    [left] = ins.args
    assert isinstance(left, Imm)
    return warp.part(Products).wait(left.bits)


def multiply(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """mma.sync of a warp."""
    if wait := warp.together(lanes):
        return wait
    (_, _, _), types = shape_of(ins)
    types = tuple(t for t in types if t not in ("row", "col", "satfinite"))
    if (
        types[0] not in TYPES
        or types[1] not in fragments.BITS
        or "sp" in ins.parts
        or "satfinite" in ins.parts
    ):
        raise NotImplementedError(str(ins))
    d, a, b, c = (x if isinstance(x, tuple) else (x,) for x in ins.args[:4])
    left = fragments.operand([warp.get(r) for r in a], types[1], 16)
    right = fragments.operand([warp.get(r) for r in b], types[2], 8)
    before = fragments.accumulators([warp.get(r) for r in c], TYPES[types[3]], types[3] == "f16")
    result = add(before, times(left, right), TYPES[types[0]])
    for target, value in zip(d, fragments.results(result, types[0] == "f16"), strict=True):
        warp.set(target, value, lanes)
    return None


def _rows(warp: Warp, ins: Instruction, address: Operand) -> np.ndarray:
    """Addresses of the rows of ldmatrix or stmatrix."""
    if "m8n8" not in ins.parts or "b16" not in ins.parts:
        raise NotImplementedError(str(ins))
    count = next(int(p[1:]) for p in ins.parts if p in ("x1", "x2", "x4"))
    at = shared_addresses(warp, address)[: 8 * count]
    if (at % 16).any():
        raise Fault(f"misaligned: a row of {ins.parts[0]} at shared address {int(at[at % 16 != 0][0])}")
    shared = warp.block.shared
    shared.check(int(at.min()), int(at.max()) + 16)
    return at


def load_matrix(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """ldmatrix: any lane may read any part."""
    if wait := warp.together(lanes):
        return wait
    at = _rows(warp, ins, ins.args[1])
    shared = warp.block.shared
    shared.read(at, 16, MANY, warp.access(), "ldmatrix")
    words = shared.view[4][(at >> 2)[:, None] + np.arange(4)]
    targets = ins.args[0] if isinstance(ins.args[0], tuple) else (ins.args[0],)
    for target, value in zip(targets, fragments.loaded(words, "trans" in ins.parts), strict=True):
        warp.set(target, value, lanes)
    return None


def store_matrix(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """stmatrix: any lane may write any part."""
    if wait := warp.together(lanes):
        return wait
    at = _rows(warp, ins, ins.args[0])
    if len(set(at.tolist())) < len(at):
        warp.device.note("race", "rows of stmatrix overlap")
    shared = warp.block.shared
    shared.write(at, 16, MANY, warp.access(), "stmatrix")
    sources = ins.args[1] if isinstance(ins.args[1], tuple) else (ins.args[1],)
    rows = fragments.stored([warp.get(x) for x in sources], "trans" in ins.parts)
    shared.view[4][(at >> 2)[:, None] + np.arange(4)] = rows
    warp.device.moved()
    return None


WARPGROUP: dict[str, Operation] = {
    "fence": wgmma_fence,
    "mma_async": multiply_async,
    "commit_group": commit,
    "wait_group": wait_group,
}
OTHERS: dict[str, Operation] = {"mma": multiply, "ldmatrix": load_matrix, "stmatrix": store_matrix}


def find(ins: Instruction) -> Operation | None:
    if ins.parts[0] == "wgmma":
        return WARPGROUP.get(ins.parts[1]) if "sp" not in ins.parts else None
    return OTHERS.get(ins.parts[0])
