"""What all blocks of a launch share: global memory, tensor maps, the schedule, and what is reported."""

from __future__ import annotations

from typing import Any

import numpy as np

from tools.ptx_machine.clocks import KINDS, Lanes
from tools.ptx_machine.conversions import GENERIC_PARAM
from tools.ptx_machine.descriptors import decoded
from tools.ptx_machine.findings import Fault, Findings
from tools.ptx_machine.launch import Launch
from tools.ptx_machine.memory import Array, Global, Log, Shared
from tools.ptx_machine.schedules import Schedule, Scheduler
from tools.ptx_machine.static import never_written, read, unfenced, written
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.tensor_maps import TensorMap
from tools.ptx_machine.translate import DTYPES, SHARED_BASE, Program


class Device:
    """A run of a kernel.

    Attributes:
        at: the instruction that is executed.
        executed: instructions of warps.
        operations: by step, what executes it, see `warp.Operation`; None for arithmetic and branches.
        granules: bytes of shared and of global memory that a shadow tells apart.
        places: what releases gave to places in memory, by (block or -1, address).
        plans: what operations have worked out for an instruction, by its line.
    """

    def __init__(
        self,
        program: Program,
        operations: list[Any],
        launch: Launch,
        arrays: list[Array],
        granules: tuple[int, int],
        schedule: Schedule,
        races: bool,
        watched: set[str],
        barriers: int,
    ) -> None:
        self.program, self.operations, self.launch, self.granules = program, operations, launch, granules
        self.scheduler = Scheduler(schedule)
        self.findings = Findings(program.kernel.body)
        self.log = Log(self.findings) if races else None
        self.covered = bytearray(len(program.steps))
        self.at: Instruction | None = None
        self.executed = self.last_change = 0
        self.places: dict[Any, Any] = {}
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
        self.plans: dict[int, Any] = {}
        self.touched: dict[int, frozenset[int]] = {}
        self.events = 0
        self.tiles: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        for kind, check in (("fence", unfenced), ("undefined register", never_written)):
            for x in check(program.kernel):
                self.findings.add(kind, x.message, x.instruction.line, x.other.line if x.other else 0)
        for tensor in (t for p in launch.params if isinstance(p, tuple) for t in p):
            for problem in tensor.problems():
                self.findings.add("tensor map", problem, 0)

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
