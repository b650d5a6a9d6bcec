"""Barriers of a block: named ones, mbarriers, and fences.

PTX ISA, "Parallel Synchronization and Communication Instructions": "bar, barrier", "bar.warp.sync",
"mbarrier", "membar / fence".
"""

from __future__ import annotations

import numpy as np

from tools.ptx_machine.accesses import Order
from tools.ptx_machine.clocks import GLOBAL_FENCED, MANY, PLAIN, SEEN, SHARED_FENCED, Knowledge, Lanes
from tools.ptx_machine.conversions import GENERIC_SHARED
from tools.ptx_machine.findings import Fault
from tools.ptx_machine.memory import BARRIER, CTA, GPU
from tools.ptx_machine.operands import Mem, Not, Operand, Reg
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import Operation, Wait, Warp

MOST_ARRIVALS = MOST_BYTES = (1 << 20) - 1  # PTX ISA, "mbarrier: valid ranges"
NAMED = 16


class Named:
    """A barrier of bar.sync and bar.arrive."""

    def __init__(self, agents: int) -> None:
        self.agents = agents
        self.turn = self.arrived = self.expected = 0
        self.present: set[int] = set()
        self.gathered: Knowledge | None = None
        self.votes: list[bool] = []

    def arrive(
        self, warp: Warp, lanes: Lanes, threads: int, expected: int, number: int
    ) -> tuple[Knowledge, list[bool]]:
        if self.gathered is None or self.arrived == 0:
            self.expected, self.gathered, self.present, self.votes = (
                expected,
                Knowledge(self.agents),
                set(),
                [],
            )
        if expected != self.expected:
            raise Fault(
                f"barrier {number}: a warp expects {expected} threads, an earlier one {self.expected}"
            )
        if warp.number in self.present and threads == 32:
            warp.device.note(
                "barrier", f"barrier {number} is reused too early: the warp has arrived in this turn"
            )
        self.present.add(warp.number)
        warp.clock.release(lanes, warp.alive, self.gathered)
        self.arrived += threads
        if self.arrived > expected:
            raise Fault(f"barrier {number}: {self.arrived} threads arrive, {expected} are expected")
        mine = self.gathered, self.votes
        if self.arrived == expected:
            self.arrived = 0
            self.turn += 1
        warp.device.moved()
        return mine


def bar(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """bar and barrier: sync, arrive, red; bar.warp.sync."""
    parts = [p for p in ins.parts if p != "cta"]
    if parts[1] == "warp":
        if wait := warp.together(lanes, warp.members(ins.args[0], lanes)):
            return wait
        warp.clock.synchronise(lanes, warp.alive)
        return None
    if parts[1] not in ("sync", "arrive", "red"):
        raise NotImplementedError(str(ins))
    whole = parts[0] == "bar" or "aligned" in parts
    if whole and (wait := warp.together(lanes)):
        return wait
    args = list(ins.args)
    target = args.pop(0) if parts[1] == "red" else None
    condition = args.pop() if parts[1] == "red" else None
    number = warp.one(warp.get(args[0]), lanes)
    expected = warp.one(warp.get(args[1]), lanes) if len(args) > 1 else 32 * warp.block.warp_count
    if number >= NAMED:
        raise Fault(f"barrier {number}: there are {NAMED}")
    if expected % 32 or expected == 0:
        raise Fault(f"barrier {number}: {expected} threads are no whole warps")
    state: Named | None = warp.block.named.get(number)
    if state is None:
        state = warp.block.named[number] = Named(warp.device.agents)
    if condition is not None and state.arrived == 0:
        state.votes = []
    gathered, votes = state.arrive(warp, lanes, 32 if whole else lanes.count, expected, number)
    turn = state.turn if state.arrived else state.turn - 1
    if condition is not None:
        votes.extend(_predicate(warp, condition)[lanes.index].tolist())
    if parts[1] == "arrive":
        return None

    def then() -> None:
        warp.clock.acquire(lanes, warp.alive, gathered)
        if target is not None:
            if "popc" in parts:
                warp.set(target, np.full(32, sum(votes), np.uint32), lanes)
            else:
                warp.set(target, np.full(32, all(votes) if "and" in parts else any(votes)), lanes)

    return Wait(lambda: state.turn > turn, then, f"barrier {number} ({state.arrived} of {expected} threads)")


def _predicate(warp: Warp, x: Operand) -> np.ndarray:
    return ~warp.get(x.operand, "p") if isinstance(x, Not) else warp.get(x, "p")


class MBarrier:
    """An mbarrier object.

    Attributes:
        count: arrivals of a phase; pending: those that are missing; tx: bytes that are missing.
        phase: number of complete phases.
        agent: of the asynchronous copies that report to it: their count is the phase that they end, from 1.
        gathered: what arrivals of this phase gave; last: of the last complete phase.
        started: what was known where asynchronous arrivals of this phase began, which they do not give.
        observers: who saw the last complete phase: warp's agent and lanes, to count and PTX line.
        ready: its initialisation is visible to the async proxy.
    """

    def __init__(self, address: int, count: int, agent: int, warp: Warp, lane: int) -> None:
        self.address, self.count, self.pending, self.agent = address, count, count, agent
        self.tx = self.phase = 0
        self.agents = warp.device.agents
        self.gathered, self.last = Knowledge(self.agents), Knowledge(self.agents)
        self.started = Knowledge(self.agents)
        self.observers: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self.creator = warp.clock.agents[PLAIN], lane, warp.clock.count[PLAIN]
        self.line = warp.line
        self.known_to: set[tuple[int, bytes]] = set()
        self.ready = False
        self.device = warp.device

    def settle(self, line: int) -> None:
        """Completes the phase if nothing is missing.

        A thread that waits for a phase must look before the next phase completes: the parity is the same
            again
        after that ("mbarrier.test_wait / mbarrier.try_wait": only the current and the preceding phase).
        """
        if self.pending or self.tx:
            return
        for (agent, lanes), (count, seen_at) in self.observers.items():
            known = self.gathered, self.started
            if not all(any(x.knows(SEEN, agent, lane, count) for x in known) for lane in lanes):
                self.device.findings.add(
                    "barrier",
                    "an mbarrier is reused too early: its next phase can complete before a waiter has looked",
                    line,
                    seen_at,
                )
        self.observers = {}
        self.phase += 1
        self.pending = self.count
        self.gathered.table[:, self.agent] = self.phase
        self.last, self.gathered, self.started = self.gathered, Knowledge(self.agents), Knowledge(self.agents)
        self.device.moved()

    def land(self, size: int, line: int) -> None:
        """A copy has written its bytes (complete_tx)."""
        self.tx -= size
        if not -MOST_BYTES <= self.tx <= MOST_BYTES:
            raise Fault(f"tx-count of the mbarrier at {self.address} is {self.tx}: at most {MOST_BYTES}")
        self.settle(line)

    def observe(self, warp: Warp, lanes: Lanes) -> None:
        warp.clock.acquire(lanes, warp.alive, self.last)
        who = (MANY,) if lanes.count == warp.alive.count else tuple(lanes.list)
        self.observers[warp.clock.agents[PLAIN], who] = warp.clock.count[PLAIN], warp.line

    def missed(self, warp: Warp, lanes: Lanes, parity: int) -> bool:
        """Whether the phase that lanes wait for is over, and the next one, too."""
        lane = lanes.list[0]
        known = int(warp.clock.of(lane).table[SEEN, self.agent])
        wanted = known + (known & 1 != parity)
        return wanted + 2 <= self.phase


def find_mbarrier(warp: Warp, address: int, lanes: Lanes) -> MBarrier:
    found = warp.block.mbarriers.get(address)
    if found is None:
        raise Fault(f"there is no mbarrier at shared address {address}")
    key = warp.number, lanes.mask.tobytes()
    if key not in found.known_to:
        agent, lane, count = found.creator
        if all(warp.clock.knows(SEEN, agent, lane, count, x) for x in lanes.list):
            found.known_to.add(key)
        else:
            warp.device.note(
                "race", "an mbarrier is used by a thread that may not see its initialisation", found.line
            )
    return found


def groups(warp: Warp, addresses: np.ndarray, lanes: Lanes) -> list[tuple[int, Lanes]]:
    """Lanes by their address."""
    used = addresses[lanes.index]
    if (used == used[0]).all():
        return [(int(used[0]), lanes)]
    return [(int(a), warp.device.lanes(lanes.mask & (addresses == a))) for a in np.unique(used)]


def shared_addresses(warp: Warp, x: Operand) -> np.ndarray:
    at = warp.addresses(x)
    return at if at.max() < GENERIC_SHARED else np.where(at >= GENERIC_SHARED, at - GENERIC_SHARED, at)


def initialise(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """mbarrier.init: by one thread, before any other use."""
    counts = warp.get(ins.args[1])
    for address, some in groups(warp, shared_addresses(warp, ins.args[0]), lanes):
        if address % 8:
            raise Fault(f"misaligned: mbarrier at shared address {address}, must be a multiple of 8")
        if some.count > 1 or address in warp.block.mbarriers:
            warp.device.note("barrier", "an mbarrier is initialised twice")
        count = warp.one(counts, some)
        if not 1 <= count <= MOST_ARRIVALS:
            raise Fault(f"mbarrier of {count} arrivals: 1 to {MOST_ARRIVALS}")
        shared = warp.block.shared
        shared.check(address, address + 8)
        if shared.shadow:
            g = np.arange(address >> shared.shift, address + 8 >> shared.shift)
            shared.shadow.write(g, some.list[0], warp.access(), "mbarrier.init")
            shared.shadow.writers[g] = BARRIER
        found = MBarrier(address, count, warp.block.new_agent(), warp, some.list[0])
        warp.block.mbarriers[address] = found


def invalidate(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """mbarrier.inval."""
    for address, some in groups(warp, shared_addresses(warp, ins.args[0]), lanes):
        found = find_mbarrier(warp, address, some)
        if found.tx:
            warp.device.note("barrier", "an mbarrier is invalidated while copies report to it")
        del warp.block.mbarriers[address]
        shared = warp.block.shared
        if shared.shadow:
            g = np.arange(address >> shared.shift, address + 8 >> shared.shift)
            shared.shadow.writers[g] = shared.shadow.log.writer(warp.access())


def arrive(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """mbarrier.arrive and arrive_drop, with expect_tx: it comes before the arrival."""
    mem = next(x for x in ins.args if isinstance(x, Mem))
    rest = ins.args[ins.args.index(mem) + 1 :]
    state = ins.args[0] if ins.args[0] is not mem else None
    for address, some in groups(warp, shared_addresses(warp, mem), lanes):
        found = find_mbarrier(warp, address, some)
        operands = warp.get(rest[0])[some.index] if rest else np.ones(some.count, np.uint32)
        arrivals = some.count
        if "expect_tx" in ins.parts:
            expect(found, int(operands.sum()))
        else:
            arrivals = int(operands.sum())
        if found.pending < arrivals:
            many = found.count - found.pending + arrivals
            raise Fault(f"mbarrier at {address}: {many} arrivals in a phase of {found.count}")
        if isinstance(state, Reg):
            warp.set(state, np.full(32, found.phase, warp.kind(state)), some)
        if "relaxed" not in ins.parts:
            warp.clock.release(some, warp.alive, found.gathered)
        found.pending -= arrivals
        if "arrive_drop" in ins.parts:
            found.count -= arrivals
        found.settle(ins.line)
        warp.device.moved()


def expect(found: MBarrier, size: int) -> None:
    found.tx += size
    if found.tx > MOST_BYTES:
        raise Fault(f"tx-count of the mbarrier at {found.address} is {found.tx}: at most {MOST_BYTES}")


def expect_tx(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """mbarrier.expect_tx and complete_tx."""
    sizes = warp.get(ins.args[1])
    for address, some in groups(warp, shared_addresses(warp, ins.args[0]), lanes):
        found, size = find_mbarrier(warp, address, some), int(sizes[some.index].sum())
        if ins.parts[1] == "expect_tx":
            expect(found, size)
        else:
            found.land(size, ins.line)


def wait(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """mbarrier.test_wait and try_wait: a phase by its parity, or by the state of an arrival.

    try_wait blocks, for a time that is not said; here for ever, or not at all.
    """
    phases = warp.get(ins.args[2], "b32" if "parity" in ins.parts else "b64")
    if "parity" in ins.parts and (phases[lanes.index] > 1).any():
        raise Fault(f"mbarrier wait for parity {phases[lanes.index].max()}: must be 0 or 1")
    looks = []
    for address, same in groups(warp, shared_addresses(warp, ins.args[1]), lanes):
        found = find_mbarrier(warp, address, same)
        for parity, some in groups(warp, phases & phases.dtype.type(1), same):
            if found.missed(warp, some, parity):
                text = "an mbarrier was reused too early: two phases completed before this waiter looked"
                warp.device.note("barrier", text)
            looks.append((found, parity, some))
    if ins.parts[1] == "test_wait" or len(looks) > 1 or warp.device.scheduler.times_out():
        for look in looks:
            _look(warp, ins, *look)
        return None
    [(found, parity, _)] = looks
    missing = f"phase {found.phase}, {found.pending} arrivals and {found.tx} bytes missing"
    return Wait(
        lambda: found.phase & 1 != parity,
        lambda: _look(warp, ins, found, parity, lanes),
        f"parity {parity} of the mbarrier at {found.address} ({missing})",
    )


def _look(warp: Warp, ins: Instruction, found: MBarrier, parity: int, lanes: Lanes) -> None:
    """Tells lanes whether the phase is complete."""
    done = found.phase & 1 != parity
    warp.line = ins.line
    if done and "relaxed" not in ins.parts:
        found.observe(warp, lanes)
    warp.spins |= not done
    warp.set(ins.args[0], np.full(32, done), lanes)


def fence(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """fence and membar."""
    parts = ins.parts
    if "proxy" in parts:
        if any(p.startswith("async") for p in parts):
            spaces = [p.split(":")[0] for p in parts[parts.index("proxy") + 2 :]]
            rows = tuple(
                row for row, name in ((SHARED_FENCED, "shared"), (GLOBAL_FENCED, "global")) if name in spaces
            )
            warp.clock.fence(lanes, warp.alive, rows or (SHARED_FENCED, GLOBAL_FENCED))
        return
    if "mbarrier_init" in parts:
        for found in warp.block.mbarriers.values():
            agent, lane, count = found.creator
            found.ready |= any(warp.clock.knows(SEEN, agent, lane, count, x) for x in lanes.list)
        return
    scope = CTA if "cta" in parts else GPU
    both = parts[0] == "membar" or "sc" in parts or "acq_rel" in parts
    warp.part(Order).fence(lanes, both or "acquire" in parts, both or "release" in parts, scope)


MBARRIER: dict[str, Operation] = {
    "init": initialise,
    "inval": invalidate,
    "arrive": arrive,
    "arrive_drop": arrive,
    "expect_tx": expect_tx,
    "complete_tx": expect_tx,
    "test_wait": wait,
    "try_wait": wait,
}
OTHERS: dict[str, Operation] = {"bar": bar, "barrier": bar, "fence": fence, "membar": fence}


def find(ins: Instruction) -> Operation | None:
    return MBARRIER.get(ins.parts[1]) if ins.parts[0] == "mbarrier" else OTHERS.get(ins.parts[0])
