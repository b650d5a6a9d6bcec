"""Instructions that only control execution."""

from __future__ import annotations

from tools.ptx_machine.clocks import Lanes
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.operands import Imm
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import Operation, Wait, Warp


def registers(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "setmaxnreg": 24 to 256, a multiple of 8."""
    if wait := warp.together(lanes):
        return wait
    [count] = ins.args
    assert isinstance(count, Imm)
    if count.bits % 8 or not 24 <= count.bits <= 256:
        raise Fault(f"setmaxnreg {count.bits}: must be a multiple of 8 from 24 to 256")
    return None


def sleep(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "nanosleep"."""
    warp.spins = True


def nothing(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "griddepcontrol": the kernels before this one are over."""


def trap(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    raise Fault("the kernel executes trap")


OPERATIONS: dict[str, Operation] = {
    "setmaxnreg": registers,
    "nanosleep": sleep,
    "griddepcontrol": nothing,
    "trap": trap,
}


def find(ins: Instruction) -> Operation | None:
    return OPERATIONS.get(ins.parts[0])
