"""A thread block: its shared memory, barriers, warps, and asynchronous operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.ptx_machine.barriers import MBarrier, Named
from tools.ptx_machine.clocks import KINDS
from tools.ptx_machine.copies import Load
from tools.ptx_machine.memory import Restart, Shared
from tools.ptx_machine.warp import Warp

if TYPE_CHECKING:
    from tools.ptx_machine.machine import Machine

NAMED = 16


class Block:
    """A resident block.

    Attributes:
        index: along x, y, z in the grid.
        pending: asynchronous operations; `advance()` of one performs its next step, and tells whether it was
            the last.
        seen_events: of the machine, when the warps were last asked whether they can go on.
    """

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        gx, gy, _ = machine.launch.grid
        self.index = number % gx, number // gx % gy, number // (gx * gy)
        x, y, z = machine.launch.block
        self.warp_count = -(-x * y * z // 32)
        self.first_agent = number * machine.agents_per_block
        self.named = [Named(machine.agents) for _ in range(NAMED)]
        self.mbarriers: dict[int, MBarrier] = {}
        self.barrier_count = 0
        self.shared = Shared(
            machine.log,
            machine.shared_base,
            machine.shared_size,
            machine.granules[0],
            machine.scheduler.garbage,
        )
        self.pending: list[Any] = []
        self.seen_events = -1
        self.warps = [Warp(self, i) for i in range(self.warp_count)]
        self.running = list(self.warps)

    def new_agent(self) -> int:
        """Of the copies that report to a new mbarrier."""
        if self.barrier_count == self.machine.barriers_per_block:
            raise Restart(barriers=2 * self.machine.barriers_per_block)
        self.barrier_count += 1
        return self.first_agent + KINDS * self.warp_count + self.barrier_count - 1

    def leave(self) -> None:
        """A warp has exited."""
        self.running = [w for w in self.running if not w.done]
        if not self.running:
            for x in self.pending:
                if isinstance(x, Load):
                    text = "a block ends while a copy to its shared memory is on its way"
                    self.machine.findings.add("exit", text, x.line)

    @property
    def done(self) -> bool:
        return not self.running and not self.pending

    def perform(self) -> None:
        """One asynchronous operation, in any order."""
        i = self.machine.scheduler.random.randrange(len(self.pending))
        self.machine.at = self.machine.findings.instructions.get(self.pending[i].line)
        if self.pending[i].advance():
            self.pending.pop(i)
        self.machine.moved()

    def turn(self) -> bool:
        """Runs a warp, or performs asynchronous operations. False if nothing can be done."""
        scheduler = self.machine.scheduler
        ready = []
        polls = self.seen_events != self.machine.events
        self.seen_events = self.machine.events
        for warp in self.running:
            if polls and warp.blocked:
                warp.poll()
            if warp.ready:
                ready.append(warp)
        if self.pending:
            if scheduler.eager:
                for _ in range(2 * len(self.pending)):
                    if self.pending:
                        self.perform()
            elif not ready or scheduler.performs(any(w.spins for w in ready)):
                self.perform()
            if not ready:
                return True
        if not ready:
            return False
        warp = scheduler.warp(ready)
        warp.run(scheduler.burst())
        if warp.spins:
            scheduler.spun(warp)
        return True
