"""Programs compiled for a GPU that is not there, and what the compiler says of the kernels in them.

This needs the extra `aot` (CUDA's plugin for JAX and NVIDIA's compiler) and JAX_PLATFORMS=cpu in the environment, without which the
plugin looks for all of CUDA; no GPU and no driver. A process compiles Mosaic kernels for one compute capability: its first (jax 0.12).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.ptx import bulk_copies

TARGETS = Path(__file__).parent / "targets"
REGISTERS = 65536  # of a multiprocessor, of every compute capability that is served
RESERVED = 1024  # bytes of shared memory that a block takes besides its own: a multiprocessor has as many more than a block may have


@dataclass(frozen=True)
class KernelFacts:
    """What became of a kernel.

    Attributes:
        name: of the kernel.
        registers: of a thread.
        spilled: bytes a thread spills from registers to memory, stores and loads.
        shared: bytes of shared memory of a block, barriers left out.
        products: matrix instructions in its machine code.
        copies: asynchronous copies to shared memory in its machine code that are not TMA's.
        most_shared: bytes of shared memory that a block may have on the device that it was compiled for.
        bulk_copies: TMA's copies to and from shared memory in its PTX.
        misaligned: those of them that are not known to begin there where they must, see `ptx`.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    products: int
    copies: int
    most_shared: int
    bulk_copies: int
    misaligned: tuple[str, ...]

    def blocks(self, threads: int) -> int:
        """Blocks of so many threads that a multiprocessor of the device holds at a time; none if one asks for too much."""
        registers = -(-self.registers // 8) * 8 * threads
        return min(REGISTERS // registers, (self.most_shared + RESERVED) // (self.shared + RESERVED))


def targets() -> list[str]:
    """Names of the devices that there are files for."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def description(target: str) -> str:
    """What XLA asks of a device, such as 'h200': a GpuTargetConfigProto as text.

    Raises:
        ValueError: there is no file for it in `targets`.
    """
    if target not in targets():
        raise ValueError(f"target={target!r}: one of {', '.join(targets())}")
    return (TARGETS / f"{target}.txtpb").read_text()


def devices(target: str, count: int) -> list[jax.Device]:
    """Devices of one host, such as 'h200', to compile for.

    Raises:
        ValueError: there is no file for it in `targets`.
    """
    text = description(target)
    return list(topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=text).devices)


def device(target: str) -> jax.Device:
    """One of them."""
    return devices(target, 1)[0]


def compile_for(device: jax.Device, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """function compiled for the device.

    Args:
        args: trees of arrays, or of what has their shapes and dtypes.
        donate: positions of those that results may take the place of.
    """
    whole = NamedSharding(jax.sharding.Mesh([device], ("x",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
    with jax.default_device(device):  # whose compute capability is what Mosaic takes for the target's
        return jax.jit(function, donate_argnums=donate).lower(*placed).compile()


def kernel_facts(device: jax.Device, function: Callable[..., Any], *args: Any) -> tuple[list[KernelFacts], jax.stages.Compiled]:
    """Compiles as `compile_for` does; not for use by several threads, since the compiler is asked through the environment.

    Returns:
        Facts of each Mosaic kernel that was compiled, and the program.
    """
    with tempfile.TemporaryDirectory() as folder, _dumped(folder):
        compiled = compile_for(device, function, *args)
        return [_read(file, device) for file in sorted(Path(folder).glob("*.ptxas"))], compiled


def _read(report: Path, device: jax.Device) -> KernelFacts:
    text, resources = report.read_text(), report.with_suffix(".resources.txt").read_text()
    capability = "sm_" + device.compute_capability.replace(".", "")
    if not re.search(rf"for '{capability}a?'", text):
        raise RuntimeError(f"{device.device_kind}: compiled for another compute capability, which this process compiled for before")
    [registers] = re.findall(r"Used (\d+) registers", text)
    [shared] = re.findall(r"smem_scratch_bytes=(\d+)", resources)
    [spills] = re.findall(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    code = report.with_suffix(".sass_ctrl").read_text()
    products, copies = (len(re.findall(rf"\b{name}\b", code)) for name in ("[HQ]G?MMA", "LDGSTS"))
    most_shared: int = device.shared_memory_per_block_optin
    bulk = bulk_copies(report.with_suffix(".ptx").read_text())
    misaligned = tuple(copy for copy, aligned in bulk if not aligned)
    return KernelFacts(
        report.stem, int(registers), sum(map(int, spills)), int(shared), products, copies, most_shared, len(bulk), misaligned
    )


@contextmanager
def _dumped(folder: str) -> Iterator[None]:
    """Has Mosaic write what it compiles into the folder."""
    wanted = {"MOSAIC_GPU_DUMP_TO": folder} | dict.fromkeys(("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS"), "1")
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
