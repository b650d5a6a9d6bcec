"""Facts that NVIDIA's compiler reports of kernels for an absent GPU; see `ahead_of_time`."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from copy_alignment import bulk_copies
from swizzle_check import accesses

from pallas_kernels.compilation.ahead_of_time import lower_for

REGISTERS = 65536  # of a multiprocessor, for all supported compute capabilities
# bytes of shared memory reserved per block; a multiprocessor has this much more than the maximum of a block
RESERVED = 1024


@dataclass(frozen=True)
class KernelFacts:
    """Facts about a compiled kernel.

    Attributes:
        name: the kernel's name.
        registers: registers per thread.
        spilled: bytes that a thread spills from registers to memory, stores and loads.
        shared: bytes of shared memory per block.
        products: number of matrix instructions in its machine code.
        in_flight: products of warpgroups that are issued before the first of them is awaited, at most; 0 on
            Ampere.
        serialized: the compiler waits after each product of a warpgroup, because it could not prove its
            registers unused.
        copies: number of asynchronous copies to shared memory in its machine code, without TMA.
        most_shared: maximum bytes of shared memory per block on the device.
        bulk_copies: number of TMA copies to and from shared memory in its PTX.
        misaligned: those whose address is not provably aligned, see `copy_alignment`.
        swizzled: number of places in the program's kernels of this name where registers or tensor cores
            access swizzled shared memory.
        mixed_up: those that may find other numbers than TMA has put there, see `swizzle_check`.
        grid, threads: number of blocks that are launched, and of threads of a block.
        code: the machine code as text, with the compiler's labels.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    products: int
    in_flight: int
    serialized: bool
    copies: int
    most_shared: int
    bulk_copies: int
    misaligned: tuple[str, ...]
    swizzled: int
    mixed_up: tuple[str, ...]
    grid: int
    threads: int
    code: str = field(repr=False)

    def blocks(self, threads: int) -> int:
        """Number of blocks of this many threads that fit on a multiprocessor; 0 if a block is too large."""
        registers = -(-self.registers // 8) * 8 * threads
        return min(REGISTERS // registers, (self.most_shared + RESERVED) // (self.shared + RESERVED))


def kernel_facts(
    device: jax.Device, function: Callable[..., Any], *args: Any
) -> tuple[list[KernelFacts], jax.stages.Compiled]:
    """Compiles what `lower_for` returns. Not thread-safe, since it configures the compiler through the
    environment.

    Returns:
        Facts about each Mosaic kernel, and the program. Kernels that this process has compiled before are
        missing: Mosaic reuses them.
    """
    # nothing is dumped here: Mosaic's constraints as text would take most of the time
    with accesses() as swizzled:
        lowered = lower_for(device, function, *args)
    with tempfile.TemporaryDirectory() as folder, _dumped(folder):
        compiled = lowered.compile()
        reports = sorted(Path(folder).glob("*.ptxas"), key=_name_and_number)
        # Kernels in lane semantics (Ampere's) state every layout themselves, and use no TMA: nothing is
        # inferred.
        return [
            _read(report, device, swizzled.get(_name_and_number(report)[0], {})) for report in reports
        ], compiled


def _name_and_number(file: Path) -> tuple[str, int]:
    """From a file NAME_NUMBER.ptxas. Kernels of one name are numbered as they are compiled."""
    name, number = file.stem.rsplit("_", 1)
    return name, int(number)


def _read(report: Path, device: jax.Device, swizzled: dict[str, bool]) -> KernelFacts:
    text = report.read_text()
    capability = "sm_" + device.compute_capability.replace(".", "")
    if not re.search(rf"for '{capability}a?'", text):
        raise RuntimeError(
            f"{device.device_kind}: compiled for another compute capability, the first of this process"
        )
    [registers] = re.findall(r"Used (\d+) registers", text)
    [spills] = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    code = report.with_suffix(".sass_ctrl").read_text()
    products, copies = (len(re.findall(rf"\b{name}\b", code)) for name in ("(?:UTC)?[HQI]G?MMA", "LDGSTS"))
    most_shared: int = device.shared_memory_per_block_optin
    bulk = bulk_copies(report.with_suffix(".ptx").read_text())
    misaligned = tuple(copy for copy, aligned in bulk if not aligned)
    shared, grid, threads = _launch(report.with_suffix(".mlir-passes.log"))
    return KernelFacts(
        name=report.stem,
        registers=int(registers),
        spilled=sum(map(int, spills)),
        shared=shared,
        products=products,
        in_flight=_in_flight(code),
        serialized="wgmma.mma_async instructions are serialized" in text,
        copies=copies,
        most_shared=most_shared,
        bulk_copies=len(bulk),
        misaligned=misaligned,
        swizzled=len(swizzled),
        mixed_up=tuple(access for access, agrees in swizzled.items() if not agrees),
        grid=grid,
        threads=threads,
        code=code,
    )


def _launch(passes: Path) -> tuple[int, int, int]:
    """A kernel's bytes of shared memory, number of blocks and threads of each, from its module before the
    first pass.
    """
    constants: dict[str, int] = {}
    with passes.open() as lines:
        for line in lines:
            if constant := re.match(r"\s*(%\w+) = arith\.constant (\d+) : (?:i32|index)", line):
                constants[constant[1]] = int(constant[2])
            if shared := re.search(r"dynamic_shared_memory_size (%\w+)", line):
                sizes = [constants[size] for size in re.findall(r"%\w+ = (%\w+)(?=[,)])", line)]
                return constants[shared[1]], math.prod(sizes[:3]), math.prod(sizes[3:])
    raise RuntimeError(f"{passes.name} has no launch")


def _in_flight(code: str) -> int:
    """Groups of warpgroup products that the machine code issues, in the order of its text, before it waits
    for any of them.
    """
    largest = issued = 0
    for committed, left in re.findall(r"HGMMA\S* .*(gsb0)|WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", code):
        issued = issued + 1 if committed else min(issued, int(left))
        largest = max(largest, issued)
    return largest


@contextmanager
def _dumped(folder: str) -> Iterator[None]:
    """Makes Mosaic dump its compilations to the folder."""
    wanted = {"MOSAIC_GPU_DUMP_TO": folder} | dict.fromkeys(
        ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS"), "1"
    )
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
