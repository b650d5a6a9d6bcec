"""How a kernel is launched."""

from __future__ import annotations

from dataclasses import dataclass

from tools.ptx_machine.tensor_maps import TensorMap

Size = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """What a driver gets with a kernel.

    Attributes:
        grid: blocks.
        cluster: blocks of a cluster; zeros or ones: none.
        block: threads.
        shared: bytes of dynamic shared memory.
        params: of the kernel, in order: an integer of 8 bytes, such as an address, or tensor maps by value,
            one for each 128 bytes.
    """

    grid: Size
    cluster: Size
    block: Size
    shared: int
    params: tuple[int | tuple[TensorMap, ...], ...]


def addresses(count: int) -> list[int]:
    """Where the machine places a kernel's arrays, inputs first: far enough apart that no access reaches
    another array by mistake.
    """
    return [(i + 1) << 32 for i in range(count)]
