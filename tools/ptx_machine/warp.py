"""A warp: 32 lanes that run together while they can, and apart where they diverge.

PTX ISA, "Parallel Thread Execution", "SIMT": lanes are threads of their own. Diverged lanes run in the order
of their place in the program and meet again where these are equal; now and then another group goes first, so
that a lane may wait for another one of its warp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from tools.ptx_machine.block import Block
from tools.ptx_machine.clocks import KINDS, PLAIN, Lanes, WarpClock
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.memory import WEAK, Access
from tools.ptx_machine.operands import Imm, Mem, Operand, Reg, Sym
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.translate import DTYPES, SPECIAL

LANE = np.arange(32)
EVERY = np.ones(32, bool)
PATIENCE = 512  # steps of diverged lanes after which others go first


@dataclass(slots=True)
class Wait:
    """Why lanes do not go on.

    Attributes:
        ready: whether they can.
        then: what happens to them first.
        what: for reports.
        again: the instruction is executed again, with lanes that have come to it.
    """

    ready: Callable[[], bool]
    then: Callable[[], None] | None
    what: str
    again: bool = False


type Operation = Callable[[Warp, Instruction, Lanes], Wait | None]


class Part(Protocol):
    """What a group of operations remembers of a warp."""

    def __init__(self, warp: Warp) -> None: ...

    def leave(self, lanes: Lanes) -> None:
        """Lanes exit; the warp is done if they are the last."""


class Warp:
    """A warp of a block.

    Attributes:
        R, S: registers and special registers, as programs want them.
        pc: the step; `pcs` [32] while lanes are diverged.
        alive: lanes that have not exited.
        blocked: groups of lanes that wait.
        clock: what the lanes know of accesses to memory.
        produces: it has started copies whose end is told to an mbarrier.
        owned: registers that products in flight read and write.
        parts: see `part`.
    """

    def __init__(self, block: Block, number: int) -> None:
        device = block.device
        self.block, self.number, self.device = block, number, device
        self.program = device.program
        self.R = list(device.blank)
        self.S = self._special()
        self.pc, self.pcs = 0, None
        self.alive = device.lanes(np.ones(32, bool))
        self.blocked: list[tuple[Lanes, Wait]] = []
        self.done = self.spins = self.produces = False
        self.apart = 0
        self.first = 0  # a lane of the group that goes first, while `apart` says so
        agents = [block.first_agent + kind * block.warp_count + number for kind in range(KINDS)]
        self.clock = WarpClock(agents, device.agents)
        self.line = 0
        self.owned: set[int] = set()
        self.parts: dict[type[Part], Part] = {}

    pcs: np.ndarray | None

    def part[P: Part](self, kind: type[P]) -> P:
        """What operations of this kind remember."""
        found = self.parts.get(kind)
        if found is None:
            found = self.parts[kind] = kind(self)
        return cast(P, found)

    def _special(self) -> list[Any]:
        block, launch = self.block, self.device.launch
        x = LANE + 32 * self.number
        bx, by, _ = launch.block
        values: dict[str, Any] = {
            "%laneid": LANE,
            "%warpid": self.number,
            "%nwarpid": block.warp_count,
            "%lanemask_eq": 1 << LANE,
            "%lanemask_lt": (1 << LANE) - 1,
            "%lanemask_le": (2 << LANE) - 1,
            "%lanemask_ge": (1 << 32) - (1 << LANE),
            "%lanemask_gt": (1 << 32) - (2 << LANE),
            "%cluster_nctarank": 1,
            "%dynamic_smem_size": launch.shared,
            "%total_smem_size": block.shared.end - block.shared.base,
        }
        tid = x % bx, x // bx % by, x // (bx * by)
        for i, axis in enumerate("xyz"):
            values[f"%tid.{axis}"] = tid[i]
            values[f"%ntid.{axis}"] = launch.block[i]
            values[f"%ctaid.{axis}"] = values[f"%clusterid.{axis}"] = block.index[i]
            values[f"%nctaid.{axis}"] = values[f"%nclusterid.{axis}"] = launch.grid[i]
            values[f"%cluster_nctaid.{axis}"] = 1
        return [np.broadcast_to(np.asarray(values.get(n, 0)), 32).astype(np.uint32) for n in SPECIAL]

    # --- registers

    def get(self, x: Operand, kind: str = "b32") -> np.ndarray:
        """[32] unsigned numbers, or bools: an operand."""
        if isinstance(x, Reg):
            i = self.program.index.get(x.name)
            found: np.ndarray = self.S[SPECIAL.index(x.name)] if i is None else self.R[i]
            return found
        if isinstance(x, Imm):
            if kind == "p":
                return np.full(32, bool(x.bits))
            return np.full(32, x.bits & ((1 << int(kind[1:])) - 1), DTYPES[kind])
        if isinstance(x, Sym):
            return np.full(32, self.program.address(x), DTYPES[kind])
        raise NotImplementedError(f"operand {x}")

    def set(self, x: Operand, value: np.ndarray, lanes: Lanes) -> None:
        """Writes lanes of a register; `_` takes anything."""
        if x is None:
            return
        if not isinstance(x, Reg):
            raise NotImplementedError(f"{x} cannot be written")
        i = self.program.index[x.name]
        self.R[i] = value if lanes.count == 32 else np.where(lanes.mask, value, self.R[i])

    def kind(self, x: Reg) -> Any:
        return DTYPES[self.program.kinds[self.program.index[x.name]]]

    def addresses(self, x: Operand) -> np.ndarray:
        """[32] int64: of a memory operand, without the coordinates."""
        if not isinstance(x, Mem):
            raise NotImplementedError(f"{x} is no address")
        return self.get(x.base, "b64").astype(np.int64) + x.offset

    def one(self, values: np.ndarray, lanes: Lanes) -> int:
        """The value that all lanes share."""
        used = values[lanes.index]
        if not (used == used[0]).all():
            raise Fault("lanes disagree about an operand that must be the same in all of them")
        return int(used[0])

    # --- memory

    def access(self, strength: int = WEAK, proxy: bool = False) -> Access:
        """What the shadows keep of a plain access of now."""
        clock = self.clock
        return Access(
            clock, clock.agents[PLAIN], clock.count[PLAIN], self.line, proxy, strength, self.block.number
        )

    def asynchronous(self, kind: int, count: int, proxy: bool) -> Access:
        """What the shadows keep of an asynchronous access."""
        return Access(self.clock, self.clock.agents[kind], count, self.line, proxy, WEAK, self.block.number)

    # --- execution

    @property
    def ready(self) -> bool:
        if self.done:
            return False
        if not self.blocked:
            return True
        return self.pcs is not None and bool(self._runnable().any())

    def _runnable(self) -> np.ndarray:
        mask = self.alive.mask
        for lanes, _ in self.blocked:
            mask = mask & ~lanes.mask
        return mask

    def poll(self) -> None:
        """Lets lanes go on that have what they waited for."""
        for entry in list(self.blocked):
            lanes, wait = entry
            if wait.ready():
                self.blocked.remove(entry)
                if not wait.again:
                    self._resume(lanes, wait)

    def _resume(self, lanes: Lanes, wait: Wait) -> None:
        if wait.then is not None:
            wait.then()
        self._advance(lanes)

    def run(self, burst: int) -> None:
        """At most `burst` steps."""
        device, steps = self.device, self.program.steps
        executed = 0
        owned = self.owned
        self.spins = False
        while burst > 0 and not self.done:
            burst = min(burst - 1, 3) if self.spins else burst - 1
            if self.pcs is None:
                if self.blocked:
                    break
                pc, lanes = self.pc, self.alive
            else:
                chosen = self._choose()
                if chosen is None:
                    break
                pc, lanes = chosen
            step = steps[pc]
            device.covered[pc] = 1
            if owned and not owned.isdisjoint(device.registers(pc)):
                text = "a register of an accumulator is used before wgmma.wait_group covers its product"
                device.findings.add("race", text, step.line)
            if step.kind == "alu":
                executed += step.count
                if lanes.count == 32:
                    step.fast(self.R, self.S)
                else:
                    step.masked(self.R, self.S, lanes.mask)
                self._advance(lanes)
                continue
            executed += 1
            ins = step.instruction
            device.at = ins
            guard = None
            if ins.guard is not None:
                guard = self.R[self.program.index[ins.guard.name]]
                guard = ~guard if ins.negated else guard
            if step.kind == "branch":
                self._branch(pc, step.target, "uni" in ins.parts, lanes, guard)
                continue
            active = lanes
            if guard is not None:
                mask = guard & lanes.mask
                if not mask.any():
                    self._advance(lanes)
                    continue
                active = device.lanes(mask)
            if step.kind == "return":
                self._exit(active, lanes)
                continue
            self.line = ins.line
            wait = device.operations[pc](self, ins, active)
            if wait is None:
                self._advance(lanes)
            elif not wait.again and wait.ready():
                self._resume(lanes, wait)
            else:
                self.blocked.append((lanes, wait))
        device.executed += executed

    def _choose(self) -> tuple[int, Lanes] | None:
        runnable = self._runnable()
        if self.pcs is None or not runnable.any():
            return None
        self.apart += 1
        if self.apart % PATIENCE == 0:
            self.first = self.device.scheduler.random.choice(np.flatnonzero(runnable).tolist())
        if self.apart > PATIENCE and self.apart % PATIENCE < PATIENCE // 8 and runnable[self.first]:
            at = int(self.pcs[self.first])
        else:
            at = int(self.pcs[runnable].min())
        mask = runnable & (self.pcs == at)
        for entry in [b for b in self.blocked if b[1].again]:
            if self.pcs[entry[0].list[0]] == at:
                mask = mask | entry[0].mask
                self.blocked.remove(entry)
        return at, self.device.lanes(mask)

    def _advance(self, lanes: Lanes) -> None:
        if self.pcs is None:
            self.pc += 1
            return
        self.pcs[lanes.index] += 1
        self._meet()

    def _meet(self) -> None:
        """Lanes that are at one place run together again."""
        assert self.pcs is not None
        here = self.pcs[self.alive.index]
        if not self.blocked and (here == here[0]).all():
            self.pc, self.pcs, self.apart = int(here[0]), None, 0

    def _branch(self, pc: int, target: int, uniform: bool, lanes: Lanes, guard: np.ndarray | None) -> None:
        if guard is None:
            if self.pcs is None:
                self.pc = target
            else:
                self.pcs[lanes.index] = target
                self._meet()
            return
        taken = guard[lanes.index]
        if self.pcs is None:
            if taken.all():
                self.pc = target
                return
            if not taken.any():
                self.pc += 1
                return
            self.pcs = np.full(32, pc)
        if uniform and taken.any() and not taken.all():
            raise Fault("bra.uni diverges")
        self.pcs[lanes.index] = np.where(taken, target, pc + 1)
        self._meet()

    def _exit(self, leaving: Lanes, lanes: Lanes) -> None:
        rest = self.alive.mask & ~leaving.mask
        self.done = not rest.any()
        for part in self.parts.values():
            part.leave(leaving)
        if self.done:
            return
        if self.pcs is None:
            self.pcs = np.full(32, self.pc)
        self.alive = self.device.lanes(rest)
        self.device.moved()
        if leaving.count < lanes.count:
            self.pcs[self.device.lanes(lanes.mask & ~leaving.mask).index] += 1
        self._meet()

    def together(self, lanes: Lanes, members: np.ndarray | None = None) -> Wait | None:
        """Waits until all lanes of a mask, or of the warp, have come to a `.sync` or `.aligned` instruction.

        PTX ISA, "shfl.sync" and others: the thread waits until all non-exited threads of the mask have
        executed the instruction. Where they cannot come, this is a deadlock.
        """
        if lanes.count == self.alive.count:
            return None
        needed = self.alive.mask if members is None else members & self.alive.mask
        if not (needed & ~lanes.mask).any():
            return None

        def ready() -> bool:
            return not (needed & self.alive.mask & ~lanes.mask).any()

        return Wait(ready, None, "the other lanes of its warp", again=True)

    def members(self, mask: Operand, lanes: Lanes) -> np.ndarray:
        """[32]: the lanes of a membermask."""
        if isinstance(mask, Imm):
            value = mask.bits & 0xFFFFFFFF
            if value == 0xFFFFFFFF:
                return EVERY
        else:
            value = self.one(self.get(mask), lanes)
        members: np.ndarray = (value >> LANE & 1).astype(bool)
        if not members[lanes.index].all():
            raise Fault(f"a lane executes an instruction whose membermask {value:#x} does not name it")
        return members

    def state(self) -> str:
        """Where it is, for reports of a deadlock."""
        name = f"block {self.block.number} warp {self.number}"
        groups = [(lanes, f"waits for {wait.what}") for lanes, wait in self.blocked]
        if (rest := self._runnable()).any():
            groups.append((self.device.lanes(rest), "runs"))
        out = []
        for lanes, what in groups:
            pc = self.pc if self.pcs is None else int(self.pcs[lanes.list[0]])
            some = "" if lanes.count == 32 else f" lanes {sum(1 << x for x in lanes.list):#x}"
            out.append(f"{name}{some} {what}: {self.program.steps[pc].instruction}")
        return "\n".join(out)
