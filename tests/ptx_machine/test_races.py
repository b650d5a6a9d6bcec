"""Races of random programs: the machine reports one if, and only if, two accesses are not ordered."""

from __future__ import annotations

from itertools import combinations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ptx_machine.kernels import run
from tools.ptx_machine import ORDERS, Schedule

WARPS, WORDS = 2, 2

# A warp's part between two barriers of the block: rounds between two barriers of the warp, each of accesses
# by lanes: (write, word, lane).
accesses = st.tuples(st.booleans(), st.integers(0, WORDS - 1), st.sampled_from([0, 5]))
rounds = st.lists(accesses, max_size=3)
parts = st.lists(rounds, min_size=1, max_size=2)
programs = st.lists(st.tuples(*[parts] * WARPS), min_size=1, max_size=2)


def text_of(program: list) -> str:
    lines = ["mov.u32 %r4, memory;", "setp.eq.u32 %p0, %r0, 0;"]
    lines += [f"@%p0 st.shared.u32 [%r4+{4 * word}], %r0;" for word in range(WORDS)]
    lines += ["bar.sync 0;", "setp.ge.u32 %p1, %r0, 32;"]
    for n, phase in enumerate(program):
        for warp, part in enumerate(phase):
            lines.append(f"@{'!' if warp else ''}%p1 bra after{n}_{warp};")
            for i, some in enumerate(part):
                lines += ["bar.warp.sync -1;"] if i else []
                for write, word, lane in some:
                    lines.append(f"setp.eq.u32 %p2, %r1, {lane};")
                    place = f"[%r4+{4 * word}]"
                    op = f"st.shared.u32 {place}, %r1;" if write else f"ld.shared.u32 %r5, {place};"
                    lines.append(f"@%p2 {op}")
            lines.append(f"after{n}_{warp}:")
        lines.append("bar.sync 0;")
    return "\n".join(lines)


def races(program: list) -> bool:
    """Whether two accesses of different lanes to a word, one a write, have no barrier between them."""
    for phase in program:
        every = [
            (write, word, warp, turn, lane)
            for warp, part in enumerate(phase)
            for turn, some in enumerate(part)
            for write, word, lane in some
        ]
        for (write, word, warp, turn, lane), other in combinations(every, 2):
            if word != other[1] or not (write or other[0]):
                continue
            if warp != other[2] or (turn == other[3] and lane != other[4]):
                return True
    return False


@settings(deadline=None, max_examples=300)
@given(programs, st.integers(0, 6))
@example([([[(False, 0, 0), (False, 0, 5), (True, 0, 5)]], [[]])], 0)  # of two readers, one writes
@example([([[(True, 0, 0)], [(True, 0, 5)]], [[(False, 1, 0)]])], 0)
def test_races_are_found_and_nothing_else(program: list, seed: int) -> None:
    result = run(text_of(program), threads=64, schedule=Schedule(seed, ORDERS[seed]))
    assert result.finished
    assert {x.kind for x in result.errors} == ({"race"} if races(program) else set())
