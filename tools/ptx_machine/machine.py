"""Executes a launch of a kernel: every thread of every block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.ptx_machine import accesses, barriers, control, copies, exchange, products, tensor
from tools.ptx_machine.block import Block
from tools.ptx_machine.device import Device
from tools.ptx_machine.findings import Fault, Finding
from tools.ptx_machine.launch import Launch
from tools.ptx_machine.memory import Array, Buffer, Restart
from tools.ptx_machine.resident import Resident
from tools.ptx_machine.schedules import Schedule
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.translate import Program, Unsupported
from tools.ptx_machine.warp import Operation

FINDERS: tuple[Callable[[Instruction], Operation | None], ...] = tuple(
    part.find for part in (accesses, barriers, copies, products, tensor, exchange, control)
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
    operations = [_operation(step.instruction, step.kind) for step in program.steps]
    granules, how = _granules(program), schedule or Schedule()
    settings: dict[str, Any] = {"watched": set(), "barriers": 32}
    while True:
        try:
            device = Device(program, operations, launch, arrays, granules, how, races, **settings)
            return Machine(device, limit).result()
        except Restart as again:
            for name, value in again.settings.items():
                settings[name] = settings[name] | {value} if name == "watched" else value


class Machine:
    """The blocks of a run.

    Args:
        limit: see `execute`.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self.device, self.limit = device, limit

    def result(self) -> Result:
        device, finished = self.device, False
        with np.errstate(all="ignore"):
            try:
                self._run()
                finished = True
            except Fault as fault:
                device.note("fault", str(fault))
        found = device.findings.all()
        if not finished:
            last = next(x for x in found if x.kind == "fault")
            found = [*(x for x in found if x is not last), last]
        steps = zip(device.program.steps, device.covered, strict=True)
        buffers = device.memory.buffers
        return Result(
            {b.name: b.array() for b in buffers},
            found,
            finished,
            device.executed,
            {i.line for step, covered in steps if covered for i in step.instructions},
            {b.name for b in buffers if b.touched},
            {b.name: b for b in buffers},
        )

    def _run(self) -> None:
        device = self.device
        live: list[Resident] = []
        started = 0
        while True:
            while started < device.total and len(live) < device.resident:
                live.append(Resident(Block(device, started)))
                started += 1
            if not live:
                return
            one = device.scheduler.block(live)
            if not one.turn() and not any(other.turn() for other in live if other is not one):
                raise Fault(f"deadlock: no thread can go on\n{_state(live)}")
            if one.done:
                live.remove(one)
            live = [x for x in live if not x.done] if len(live) > 1 else live
            polled = device.executed - device.last_change
            if device.executed > self.limit or polled > max(self.limit // IDLE, 1000):
                what = "too many instructions" if device.executed > self.limit else "threads only poll"
                raise Fault(f"no end: {what} after {device.executed} instructions\n{_state(live)}")


def _state(live: list[Resident]) -> str:
    return "\n".join(warp.state() for one in live for warp in one.running)


def _operation(ins: Instruction, kind: str) -> Operation | None:
    if kind != "operation":
        return None
    for find in FINDERS:
        if (found := find(ins)) is not None:
            return found
    raise Unsupported(f"{ins}: this form is not supported")


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
