"""Executes PTX on a CPU: every thread, with delayed asynchronous effects and checks of memory.

Written from NVIDIA's PTX ISA. Needs NumPy and ml_dtypes only; knows no particular kernel.

    program = translate(parse(ptx))
    launch = Launch(grid, cluster, block, shared_bytes, params)
    result = execute(program, launch, [Array("x", x), Array("out", out, written=False)], Schedule(seed=1))
    result.arrays["out"], result.errors
"""

from tools.ptx_machine.findings import Finding
from tools.ptx_machine.launch import Launch, addresses
from tools.ptx_machine.machine import Result, execute
from tools.ptx_machine.memory import Array
from tools.ptx_machine.schedules import ORDERS, Schedule
from tools.ptx_machine.syntax import parse
from tools.ptx_machine.tensor_maps import TensorMap
from tools.ptx_machine.translate import Program, Unsupported, translate

__all__ = [
    "ORDERS",
    "Array",
    "Finding",
    "Launch",
    "Program",
    "Result",
    "Schedule",
    "TensorMap",
    "Unsupported",
    "addresses",
    "execute",
    "parse",
    "translate",
]
