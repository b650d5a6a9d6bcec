"""What the warps of a thread block share: shared memory, barriers, and asynchronous operations."""

from __future__ import annotations

from typing import Any, Protocol

from tools.ptx_machine.clocks import KINDS
from tools.ptx_machine.device import Device
from tools.ptx_machine.memory import Restart, Shared


class Pending(Protocol):
    """An asynchronous operation that is not over.

    Attributes:
        line: of the PTX.
        fills: it writes to shared memory, and tells an mbarrier when it has.
    """

    @property
    def line(self) -> int: ...

    @property
    def fills(self) -> bool: ...

    def advance(self) -> bool:
        """Performs the next step. Returns whether it was the last."""


class Block:
    """A block.

    Attributes:
        index: along x, y, z in the grid.
        named: barriers by number, see `barriers.Named`.
        mbarriers: by address, see `barriers.MBarrier`.
        pending: in no order.
        tensor: tensor memory, see `tensor.TensorMemory`, once it is used.
    """

    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number
        gx, gy, _ = device.launch.grid
        self.index = number % gx, number // gx % gy, number // (gx * gy)
        x, y, z = device.launch.block
        self.warp_count = -(-x * y * z // 32)
        self.first_agent = number * device.agents_per_block
        self.named: dict[int, Any] = {}
        self.mbarriers: dict[int, Any] = {}
        self.barrier_count = 0
        self.shared = Shared(
            device.log, device.shared_base, device.shared_size, device.granules[0], device.scheduler.garbage
        )
        self.pending: list[Pending] = []
        self.tensor: Any = None

    def new_agent(self) -> int:
        """An agent for the copies that report to a new mbarrier."""
        if self.barrier_count == self.device.barriers_per_block:
            raise Restart(barriers=2 * self.device.barriers_per_block)
        self.barrier_count += 1
        return self.first_agent + KINDS * self.warp_count + self.barrier_count - 1
