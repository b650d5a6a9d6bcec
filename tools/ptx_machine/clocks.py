"""Which accesses to memory happen before which: vector clocks of warps whose lanes are threads of their own.

PTX ISA, "Memory Consistency Model", "Causality order": an access happens before another if a chain of program
order and synchronisation (barriers, mbarriers, releases and acquires) leads from the one to the other.
Accesses through different proxies also need a proxy fence on that chain ("Proxy-preserved base causality
order").

An *agent* is a warp's plain accesses, one of its kinds of asynchronous accesses, or the copies that report to
one mbarrier. Each agent counts; an access carries its agent, the agent's count, and its lane. A `Knowledge`
holds for each agent up to which count all of its accesses are known to be over. Lanes of a warp rarely know
different things, so that a warp has one knowledge for all of its lanes, and more for lanes that synchronised
alone. Lanes that exit count as known with the rest of their warp.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SEEN, SHARED_FENCED, GLOBAL_FENCED = range(3)
"""Rows of a knowledge: what is over, and what a proxy fence covers in shared and in global memory."""

PLAIN, COPY, READ, WRITE, WGMMA, TENSOR, TENSOR_READ, TENSOR_WRITE = range(8)
"""Kinds of a warp's agents: plain accesses, cp.async, reads and writes of bulk stores, wgmma's reads; what
tcgen05.mma accesses, loads and stores of tensor memory."""

KINDS = 8
LANES_DIFFER = 4  # kinds below this one have counts that differ between lanes
MANY = 32  # the lane of an access by several lanes, or by the warp as a whole

Lane = tuple[int, int]
Row = tuple[int, int, int]


class Knowledge:
    """Up to which count the accesses of each agent are known.

    Attributes:
        table: [3, agents]; rows SEEN, SHARED_FENCED and GLOBAL_FENCED.
        lanes: the same for single lanes (agent, lane), where more is known of one than of its warp.
    """

    __slots__ = ("lanes", "table")

    def __init__(self, agents: int) -> None:
        self.table = np.zeros((3, agents), np.int32)
        self.lanes: dict[Lane, Row] = {}

    def copy(self) -> Knowledge:
        new = Knowledge.__new__(Knowledge)
        new.table, new.lanes = self.table.copy(), dict(self.lanes)
        return new

    def join(self, other: Knowledge) -> None:
        np.maximum(self.table, other.table, out=self.table)
        if other.lanes:
            for lane, row in other.lanes.items():
                self.learn(lane, row)
        if self.lanes:
            seen = self.table
            self.lanes = {
                x: row
                for x, row in self.lanes.items()
                if row[0] > seen[0, x[0]] or row[1] > seen[1, x[0]] or row[2] > seen[2, x[0]]
            }

    def learn(self, lane: Lane, row: Row) -> None:
        old = self.lanes.get(lane)
        self.lanes[lane] = (
            row if old is None else (max(old[0], row[0]), max(old[1], row[1]), max(old[2], row[2]))
        )

    def fence(self, rows: Iterable[int]) -> None:
        for row in rows:
            np.maximum(self.table[row], self.table[SEEN], out=self.table[row])
        for lane, known in self.lanes.items():
            fenced = [max(x, known[SEEN]) if i in rows else x for i, x in enumerate(known)]
            self.lanes[lane] = fenced[0], fenced[1], fenced[2]

    def knows(self, row: int, agent: int, lane: int, count: int) -> bool:
        if self.table[row, agent] >= count:
            return True
        return lane != MANY and (agent, lane) in self.lanes and self.lanes[agent, lane][row] >= count


class Lanes:
    """A set of lanes of a warp."""

    __slots__ = ("count", "index", "list", "mask")

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        self.index = np.flatnonzero(mask)
        self.list: list[int] = self.index.tolist()
        self.count = len(self.list)


class WarpClock:
    """What the lanes of a warp know, and what they have done.

    Attributes:
        agents: of the warp, by kind.
        common: what all lanes know.
        alone: what single lanes know; never less than `common`.
        count: of each kind of agent; an access that begins now carries `stamp(kind)`.
    """

    def __init__(self, agents: list[int], total: int) -> None:
        self.agents = agents
        self.kind_of = {a: kind for kind, a in enumerate(agents)}
        self.common = Knowledge(total)
        self.alone: dict[int, Knowledge] = {}
        self.count = [1] + [0] * (KINDS - 1)
        self.used = [True] + [False] * (KINDS - 1)
        self.busy = np.zeros((LANES_DIFFER, 32), bool)  # asynchronous accesses that no wait has covered
        self.done = np.zeros((LANES_DIFFER, 32), np.int32)
        self.fenced = np.zeros((3, LANES_DIFFER, 32), np.int32)  # of a lane's own accesses
        self.even = True  # all lanes fenced their plain accesses alike

    # --- a lane's own accesses

    def stamp(self, kind: int) -> int:
        return self.count[kind] + (kind != PLAIN)

    def begin(self, kind: int, lanes: Lanes) -> int:
        """The count of an asynchronous access that lanes start now."""
        self.used[kind] = True
        idle = lanes.mask & ~self.busy[kind]
        self.done[kind][idle] = self.count[kind]
        self.busy[kind] |= lanes.mask
        return self.count[kind] + 1

    def commit(self, kind: int) -> int:
        self.count[kind] += 1
        return self.count[kind]

    def finish(self, kind: int, lane: int, count: int, idle: bool) -> None:
        """A wait of a lane has covered its accesses up to a count; `idle`: it has no others."""
        self.done[kind, lane] = max(self.done[kind, lane], count)
        if idle:
            self.busy[kind, lane] = False

    def own(self, kind: int) -> np.ndarray:
        """[32]: up to which count each lane's own accesses are over."""
        if kind == PLAIN:
            return np.full(32, self.count[PLAIN], np.int32)
        return np.where(self.busy[kind], self.done[kind], self.count[kind])

    # --- synchronisation

    def release(self, lanes: Lanes, alive: Lanes, into: Knowledge) -> None:
        """Gives what lanes know and did until now."""
        if lanes.count == alive.count:
            into.join(self.common)
            for knowledge in self.alone.values():
                into.join(knowledge)
        else:
            for lane in lanes.list:
                into.join(self.alone.get(lane, self.common))
        for kind in range(LANES_DIFFER):
            if self.used[kind]:
                self._own(kind, lanes, lanes.count == alive.count, into)
        self.count[PLAIN] += 1

    def _own(self, kind: int, lanes: Lanes, whole: bool, into: Knowledge) -> None:
        agent = self.agents[kind]
        if kind == PLAIN and whole and self.even:
            row = self.count[PLAIN], int(self.fenced[1, PLAIN, 0]), int(self.fenced[2, PLAIN, 0])
            into.table[:, agent] = np.maximum(into.table[:, agent], row)
            return
        own = self.own(kind)
        rows = np.stack([own, self.fenced[1, kind], self.fenced[2, kind]])
        least = rows[:, lanes.index].min(1)
        if whole:
            into.table[:, agent] = np.maximum(into.table[:, agent], least)
            more = (rows > least[:, None]).any(0) & lanes.mask
            if not more.any():
                return
        else:
            more = lanes.mask
        for lane in np.flatnonzero(more).tolist():
            if kind == PLAIN or self.busy[kind, lane] or self.done[kind, lane]:
                into.learn((agent, lane), (int(rows[0, lane]), int(rows[1, lane]), int(rows[2, lane])))

    def acquire(self, lanes: Lanes, alive: Lanes, of: Knowledge) -> None:
        if lanes.count == alive.count:
            self.common.join(of)
            for lane in list(self.alone):
                self.alone[lane].join(of)
                if not self.alone[lane].lanes and (self.alone[lane].table <= self.common.table).all():
                    del self.alone[lane]
            return
        for lane in lanes.list:
            if lane not in self.alone:
                self.alone[lane] = self.common.copy()
            self.alone[lane].join(of)

    def synchronise(self, lanes: Lanes, alive: Lanes) -> None:
        """A barrier among lanes of the warp (bar.warp.sync)."""
        all_of_them = Knowledge(self.common.table.shape[1])
        self.release(lanes, alive, all_of_them)
        self.acquire(lanes, alive, all_of_them)

    def finish_all(self, kind: int, count: int) -> None:
        """All lanes have waited for accesses of the warp as a whole, up to a count."""
        for knowledge in (self.common, *self.alone.values()):
            knowledge.table[:, self.agents[kind]] = np.maximum(knowledge.table[:, self.agents[kind]], count)

    def fence(self, lanes: Lanes, alive: Lanes, rows: tuple[int, ...]) -> None:
        """A proxy fence by lanes; rows: which memories it covers."""
        if lanes.count == alive.count:
            self.common.fence(rows)
            for knowledge in self.alone.values():
                knowledge.fence(rows)
        else:
            for lane in lanes.list:
                if lane not in self.alone:
                    self.alone[lane] = self.common.copy()
                self.alone[lane].fence(rows)
        self.even &= lanes.count == alive.count
        for kind in range(LANES_DIFFER):
            if not self.used[kind]:
                continue
            own = self.own(kind)[lanes.index]
            for row in rows:
                self.fenced[row, kind, lanes.index] = own
        self.count[PLAIN] += 1

    # --- questions

    def of(self, lane: int) -> Knowledge:
        return self.alone.get(lane, self.common) if self.alone else self.common

    def knows(self, row: int, agent: int, owner: int, count: int, lane: int) -> bool:
        """Whether an access by a lane comes after an access of an agent's lane `owner`.

        owner: MANY if the access was made by several lanes.
        lane: MANY for an access by the warp as a whole, of which each part may be done by any lane.
        """
        if lane == MANY:
            return self.common.knows(row, agent, owner, count)
        if owner == lane:
            kind = self.kind_of.get(agent, WGMMA)
            if kind < LANES_DIFFER:
                own = self.own(kind)[lane] if row == SEEN else self.fenced[row, kind, lane]
                if own >= count:
                    return True
        return self.of(lane).knows(row, agent, owner, count)
