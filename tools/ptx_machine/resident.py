"""A block that runs: its warps and its asynchronous operations take turns."""

from __future__ import annotations

from tools.ptx_machine.block import Block
from tools.ptx_machine.warp import Warp


class Resident:
    """A resident block.

    Attributes:
        running: warps that have not exited.
        seen: number of the device's events when the warps were last asked whether they can go on.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.device, self.number = block, block.device, block.number
        self.running = [Warp(block, i) for i in range(block.warp_count)]
        self.seen = -1

    @property
    def done(self) -> bool:
        return not self.running and not self.block.pending

    def perform(self) -> None:
        """One asynchronous operation, in any order."""
        device, pending = self.device, self.block.pending
        i = device.scheduler.random.randrange(len(pending))
        device.at = device.findings.instructions.get(pending[i].line)
        if pending[i].advance():
            pending.pop(i)
        device.moved()

    def turn(self) -> bool:
        """Runs a warp, or performs asynchronous operations. False if nothing can be done."""
        scheduler, pending = self.device.scheduler, self.block.pending
        ready = []
        polls, self.seen = self.seen != self.device.events, self.device.events
        for warp in self.running:
            if polls and warp.blocked:
                warp.poll()
            if warp.ready:
                ready.append(warp)
        if pending:
            if scheduler.eager:
                for _ in range(2 * len(pending)):
                    if pending:
                        self.perform()
            elif not ready or scheduler.performs(any(w.spins for w in ready)):
                self.perform()
            if not ready:
                return True
        if not ready:
            return False
        warp = scheduler.warp(ready)
        warp.run(scheduler.burst())
        if warp.done:
            self._leave(warp)
        if warp.spins:
            scheduler.spun(warp)
        return True

    def _leave(self, warp: Warp) -> None:
        self.running.remove(warp)
        if not self.running and self.block.tensor is not None and self.block.tensor.allocated:
            self.device.note("exit", "a block ends without tcgen05.dealloc")
        for x in self.block.pending if not self.running else ():
            if x.fills:
                text = "a block ends while a copy to its shared memory is on its way"
                self.device.findings.add("exit", text, x.line)
