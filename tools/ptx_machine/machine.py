"""Executes a launch of a kernel: every thread of every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx_machine import accesses, barriers, control, copies, exchange, products
from tools.ptx_machine.block import Block
from tools.ptx_machine.clocks import KINDS, Lanes
from tools.ptx_machine.conversions import GENERIC_PARAM
from tools.ptx_machine.descriptors import decoded
from tools.ptx_machine.findings import Fault, Finding, Findings
from tools.ptx_machine.launch import Launch
from tools.ptx_machine.memory import Array, Buffer, Global, Log, Restart, Shared
from tools.ptx_machine.schedules import Schedule, Scheduler
from tools.ptx_machine.static import never_written, read, unfenced, written
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.tensor_maps import TensorMap
from tools.ptx_machine.translate import DTYPES, SHARED_BASE, Program, Unsupported
from tools.ptx_machine.warp import Operation

FINDERS: tuple[Callable[[Instruction], Operation | None], ...] = tuple(
    part.find for part in (accesses, barriers, copies, products, exchange, control)
)
IDLE = 30  # a kernel never ends if nothing but polling happens in this part of the limit


@dataclass
class Result:
    """What a run left.

    Attributes:
        arrays: values of all arrays by name.
        findings: a fault is the last one, of kind "fault".
        finished: no fault ended the run.
        instructions: of warps.
        covered: lines of the PTX that were executed.
        written: names of arrays to which the kernel wrote.
    """

    arrays: dict[str, np.ndarray]
    findings: list[Finding]
    finished: bool
    instructions: int
    covered: set[int]
    written: set[str]
    buffers: dict[str, Buffer]

    def unwritten(self, name: str) -> np.ndarray:
        """[bytes] of an array: neither the host nor the kernel has written it. Needs `races`."""
        return self.buffers[name].unwritten()

    @property
    def errors(self) -> list[Finding]:
        """Findings that say that the kernel is wrong."""
        return [x for x in self.findings if x.error]


def execute(
    program: Program,
    launch: Launch,
    arrays: list[Array],
    schedule: Schedule | None = None,
    *,
    races: bool = True,
    limit: int = 30_000_000,
) -> Result:
    """Runs a kernel. The given arrays stay as they are.

    Args:
        program: from `translate`.
        launch: made with the addresses of the arrays: 1 << 32 of the first, 2 << 32 of the second, and so on.
        races: look for accesses that are not ordered, and for what was never written.
        limit: of instructions of warps; a kernel that executes more never ends.

    Raises:
        Unsupported: an instruction or a form of it is not known, or the launch has clusters.
        ValueError: the launch does not fit the kernel.
    """
    _check(program, launch, arrays)
    settings: dict[str, Any] = {"watched": set(), "barriers": 32}
    while True:
        machine = Machine(program, launch, arrays, schedule or Schedule(), races, limit, **settings)
        try:
            return machine.result()
        except Restart as again:
            for name, value in again.settings.items():
                settings[name] = settings[name] | {value} if name == "watched" else value


class Machine:
    """A run.

    Attributes:
        at: the instruction that is executed.
        executed: instructions of warps.
        places: what releases gave to places in memory, by (block or -1, address).
        granules: bytes of shared and of global memory that a shadow tells apart.
    """

    def __init__(
        self,
        program: Program,
        launch: Launch,
        arrays: list[Array],
        schedule: Schedule,
        races: bool,
        limit: int,
        watched: set[str],
        barriers: int,
    ) -> None:
        self.program, self.launch, self.limit = program, launch, limit
        self.scheduler = Scheduler(schedule)
        self.findings = Findings(program.kernel.body)
        self.log = Log(self.findings) if races else None
        self.operations: list[Any] = [self._operation(s.instruction, s.kind) for s in program.steps]
        self.covered = bytearray(len(program.steps))
        self.at: Instruction | None = None
        self.executed = self.last_change = 0
        self.places: dict[Any, accesses.Place] = {}
        self.granules = _granules(program)
        self.memory = Global(arrays, self.log, self.granules[1], watched, self.scheduler.garbage)
        self.shared_base = min(program.shared.values(), default=SHARED_BASE)
        static = sum(size for _, size in program.kernel.shared.values())
        self.shared_size = max(launch.shared, 0) + static
        self.total = int(np.prod(launch.grid))
        self.resident = schedule.resident or self.total
        warps = -(-int(np.prod(launch.block)) // 32)
        self.barriers_per_block = barriers
        self.agents_per_block = KINDS * warps + barriers
        self.agents = self.total * self.agents_per_block
        self.blank = [self._blank(kind) for kind in program.kinds]
        self.known_lanes: dict[bytes, Lanes] = {}
        self.single = [self.lanes(np.arange(32) == i) for i in range(32)]
        self.plans: dict[int, products.Plan] = {}
        self.touched: dict[int, frozenset[int]] = {}
        self.events = 0
        self.tiles: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        for kind, check in (("fence", unfenced), ("undefined register", never_written)):
            for x in check(program.kernel):
                self.findings.add(kind, x.message, x.instruction.line, x.other.line if x.other else 0)
        for tensor in (t for p in launch.params if isinstance(p, tuple) for t in p):
            for problem in tensor.problems():
                self.findings.add("tensor map", problem, 0)

    def _operation(self, ins: Instruction, kind: str) -> Operation | None:
        if kind != "operation":
            return None
        for find in FINDERS:
            if (found := find(ins)) is not None:
                return found
        raise Unsupported(f"{ins}: this form is not supported")

    def _blank(self, kind: str) -> np.ndarray:
        if kind == "p":
            return np.zeros(32, bool)
        size = int(kind[1:]) // 8
        return self.scheduler.garbage(32 * size).view(DTYPES[kind])

    # --- services

    def lanes(self, mask: np.ndarray) -> Lanes:
        key = mask.tobytes()
        found = self.known_lanes.get(key)
        if found is None:
            found = self.known_lanes[key] = Lanes(mask.copy())
        return found

    def lanes_of(self, lane: int) -> Lanes:
        return self.single[lane]

    def note(self, kind: str, message: str, other_line: int = 0) -> None:
        """A finding about the instruction that is executed."""
        self.findings.add(kind, message, self.at.line if self.at else 0, other_line)

    def registers(self, pc: int) -> frozenset[int]:
        """All registers that a step touches; none of wgmma.mma_async, which may use accumulators."""
        found = self.touched.get(pc)
        if found is None:
            some = [i for i in self.program.steps[pc].instructions if i.parts[:2] != ("wgmma", "mma_async")]
            names = frozenset[str]().union(*(read(i) | written(i) for i in some))
            index = self.program.index
            found = self.touched[pc] = frozenset(index[n] for n in names if n in index)
        return found

    def moved(self) -> None:
        """Something happened that others can see."""
        self.last_change = self.executed
        self.events += 1

    def parameter(self, name: str, offset: int, width: int) -> int:
        value = self.launch.params[list(self.program.kernel.params).index(name)]
        if not isinstance(value, int):
            raise Fault("a tensor map is read as a number")
        return value >> (8 * offset) & ((1 << 8 * width) - 1)

    def tensor_map(self, address: int) -> TensorMap:
        """PTX ISA, "cp.async.bulk.tensor": 128 bytes at a generic address, aligned to 64."""
        if address % 64:
            raise Fault(f"misaligned: tensor map at {address:#x}, must be a multiple of 64")
        for value, (offset, size) in zip(
            self.launch.params, self.program.kernel.params.values(), strict=True
        ):
            start = GENERIC_PARAM + offset
            if start <= address < start + size and isinstance(value, tuple):
                return value[(address - start) // 128]
        raise Fault(f"there is no tensor map at {address:#x}")

    def tile(
        self, descriptor: int, first: int, rows: int, k: int, item: int, flipped: bool, shared: Shared
    ) -> tuple[np.ndarray, np.ndarray]:
        """A wgmma operand's elements [rows, k] as indices into shared memory, and its granules."""
        key = descriptor, first, rows, k, item, flipped
        found = self.tiles.get(key)
        if found is None:
            at = decoded(descriptor).addresses(np.arange(first, first + rows), k, item, flipped)
            shared.check(int(at.min()), int(at.max()) + item)
            found = self.tiles[key] = at // item, np.unique(at >> shared.shift)
        return found

    # --- the run

    def result(self) -> Result:
        finished = False
        with np.errstate(all="ignore"):
            try:
                self._run()
                finished = True
            except Fault as fault:
                self.note("fault", str(fault))
        found = self.findings.all()
        if not finished:
            last = next(x for x in found if x.kind == "fault")
            found = [*(x for x in found if x is not last), last]
        lines = {
            i.line for s, c in zip(self.program.steps, self.covered, strict=True) if c for i in s.instructions
        }
        buffers = self.memory.buffers
        return Result(
            {b.name: b.array() for b in buffers},
            found,
            finished,
            self.executed,
            lines,
            {b.name for b in buffers if b.touched},
            {b.name: b for b in buffers},
        )

    def _run(self) -> None:
        live: list[Block] = []
        started = 0
        while True:
            while started < self.total and len(live) < self.resident:
                live.append(Block(self, started))
                started += 1
            if not live:
                return
            block = self.scheduler.block(live)
            if not block.turn() and not any(other.turn() for other in live if other is not block):
                state = "\n".join(w.state() for b in live for w in b.running)
                raise Fault(f"deadlock: no thread can go on\n{state}")
            if block.done:
                live.remove(block)
            live = [b for b in live if not b.done] if len(live) > 1 else live
            if self.executed > self.limit or self.executed - self.last_change > max(self.limit // IDLE, 1000):
                state = "\n".join(w.state() for b in live for w in b.running)
                what = "too many instructions" if self.executed > self.limit else "threads only poll"
                raise Fault(f"no end: {what} after {self.executed} instructions\n{state}")


def _check(program: Program, launch: Launch, arrays: list[Array]) -> None:
    kernel, threads = program.kernel, int(np.prod(launch.block))
    if len(launch.params) != len(kernel.params):
        raise ValueError(f"the launch has {len(launch.params)} parameters, the kernel {len(kernel.params)}")
    if kernel.threads and threads > int(np.prod(kernel.threads)):
        raise ValueError(f"the launch has blocks of {threads} threads, the kernel allows {kernel.threads}")
    if len({x.name for x in arrays}) < len(arrays):
        raise ValueError(f"arrays have the same name: {[x.name for x in arrays]}")
    if threads % 32:
        raise Unsupported(f"blocks of {launch.block} threads: not a multiple of 32")
    if any(x > 1 for x in launch.cluster):
        raise Unsupported(f"clusters of {launch.cluster} blocks")


def _granules(program: Program) -> tuple[int, int]:
    """Bytes of shared and of global memory that must be told apart: of the smallest store, at most 4."""
    least = {"shared": 4, "global": 4}
    for ins in program.kernel.body:
        if ins.parts[0] not in ("st", "atom", "red"):
            continue
        width, count = accesses.vector(ins)
        space = accesses.space_of(ins)
        for name in least if space == "generic" else (space,):
            if name in least:
                least[name] = min(least[name], width * count)
    return least["shared"], least["global"]


__all__ = ["Array", "Fault", "Finding", "Machine", "Result", "Schedule", "execute"]
