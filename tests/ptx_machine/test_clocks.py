"""Clocks of warps against sets of accesses that each lane knows, spelled out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.ptx_machine.clocks import (
    COPY,
    GLOBAL_FENCED,
    KINDS,
    PLAIN,
    SEEN,
    SHARED_FENCED,
    Knowledge,
    Lanes,
    WarpClock,
)

WARPS, LANES, PLACES = 2, 3, 2
AGENTS = WARPS * KINDS
ALIVE = Lanes(np.arange(32) < LANES)
FENCES = SHARED_FENCED, GLOBAL_FENCED

type Event = tuple[int, int, int]  # warp, lane, serial number


@dataclass
class Known:
    """What a lane, or a place that synchronises, knows: events that are over, and those that are fenced."""

    seen: set[Event] = field(default_factory=set)
    fenced: dict[int, set[Event]] = field(default_factory=lambda: {row: set() for row in FENCES})

    def join(self, other: Known) -> None:
        self.seen |= other.seen
        for row, events in other.fenced.items():
            self.fenced[row] |= events


def lanes_of(mask: int) -> Lanes:
    return Lanes(np.array([bool(mask >> i & 1) for i in range(32)]))


masks = st.integers(1, (1 << LANES) - 1)
warps = st.integers(0, WARPS - 1)
places = st.integers(0, PLACES - 1)
steps = st.one_of(
    st.tuples(st.just("access"), warps, masks),
    st.tuples(st.just("copy"), warps, masks),
    st.tuples(st.just("wait"), warps, masks),
    st.tuples(st.just("release"), warps, masks, places),
    st.tuples(st.just("acquire"), warps, masks, places),
    st.tuples(st.just("synchronise"), warps, masks),
    st.tuples(st.just("fence"), warps, masks, st.sampled_from(FENCES)),
)


@settings(deadline=None, max_examples=600)
@given(st.lists(steps, min_size=4, max_size=12))
def test_clocks_know_what_sets_know(program: list) -> None:
    clocks = [WarpClock([kind * WARPS + w for kind in range(KINDS)], AGENTS) for w in range(WARPS)]
    shared = [Knowledge(AGENTS) for _ in range(PLACES)]
    known = {(w, i): Known() for w in range(WARPS) for i in range(LANES)}
    places = [Known() for _ in range(PLACES)]
    events: dict[Event, tuple[int, int]] = {}  # agent, count
    waiting: dict[tuple[int, int], list[Event]] = {key: [] for key in known}

    for name, w, mask, *more in program:
        clock, lanes = clocks[w], lanes_of(mask)
        threads = [(w, i) for i in lanes.list]
        if name == "access":
            for thread in threads:
                event = (*thread, len(events))
                events[event] = clock.agents[PLAIN], clock.stamp(PLAIN)
                known[thread].seen.add(event)
        elif name == "copy":
            count = clock.begin(COPY, lanes)
            for thread in threads:
                event = (*thread, len(events))
                events[event] = clock.agents[COPY], count
                waiting[thread].append(event)
            clock.commit(COPY)
        elif name == "wait":
            for thread in threads:
                known[thread].seen |= {*waiting[thread]}
                waiting[thread] = []
                if clock.busy[COPY, thread[1]]:
                    clock.finish(COPY, thread[1], clock.count[COPY], True)
        elif name == "release":
            clock.release(lanes, ALIVE, shared[more[0]])
            for thread in threads:
                places[more[0]].join(known[thread])
        elif name == "acquire":
            clock.acquire(lanes, ALIVE, shared[more[0]])
            for thread in threads:
                known[thread].join(places[more[0]])
        elif name == "synchronise":
            clock.synchronise(lanes, ALIVE)
            both = Known()
            for thread in threads:
                both.join(known[thread])
            for thread in threads:
                known[thread].join(both)
        else:
            clock.fence(lanes, ALIVE, (more[0],))
            for thread in threads:
                known[thread].fenced[more[0]] |= known[thread].seen

    for (w, lane), want in known.items():
        for event, (agent, count) in events.items():
            got = [clocks[w].knows(row, agent, event[1], count, lane) for row in range(3)]
            assert got[SEEN] == (event in want.seen)
            for row, fenced in want.fenced.items():
                assert got[row] == (event in fenced)
