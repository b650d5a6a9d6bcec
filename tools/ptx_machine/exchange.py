"""Exchange among the lanes of a warp: shfl, vote, elect, activemask, redux, match.

They order nothing in memory: only bar.warp.sync and other barriers do (PTX ISA, "bar.warp.sync", and
"Memory Consistency Model", "Synchronizes-with").
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tools.ptx_machine.clocks import Lanes
from tools.ptx_machine.numbers import NAN
from tools.ptx_machine.operands import Imm, Pair
from tools.ptx_machine.syntax import Instruction
from tools.ptx_machine.warp import LANE, Operation, Wait, Warp


def sources(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[32] of shfl: the lane that each reads, and whether it lies in the segment; if not, it is itself."""
    lane, segment = b & 31, c >> 8 & 31
    top, low = (LANE & segment) | (c & 31 & ~segment), LANE & segment
    source = {
        "bfly": LANE ^ lane,
        "idx": low | (lane & ~segment),
        "up": LANE - lane,
        "down": LANE + lane,
    }[mode]
    inside = source >= top if mode == "up" else source <= top
    return np.where(inside, source, LANE), inside


@cache
def _constant_sources(mode: str, b: int, c: int) -> tuple[np.ndarray, np.ndarray]:
    return sources(mode, np.full(32, b), np.full(32, c))


def shuffle(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "shfl.sync"."""
    target, a, b, c = ins.args[:4]
    members = warp.members(ins.args[4], lanes)
    if wait := warp.together(lanes, members):
        return wait
    value, mode = warp.get(a), ins.parts[2]
    if isinstance(b, Imm) and isinstance(c, Imm):
        source, inside = _constant_sources(mode, b.bits, c.bits)
    else:
        source, inside = sources(mode, warp.get(b).astype(np.int64), warp.get(c).astype(np.int64))
    if not lanes.mask[source[lanes.index]].all():
        warp.device.note("inactive lane", "shfl.sync reads a lane that does not take part")
    if isinstance(target, Pair):
        warp.set(target.second, inside, lanes)
        target = target.first
    warp.set(target, value[source], lanes)
    return None


def elect(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "elect.sync": one lane, always the same for a mask."""
    if wait := warp.together(lanes, warp.members(ins.args[1], lanes)):
        return wait
    leader = lanes.list[warp.device.scheduler.leader % lanes.count]
    target = ins.args[0]
    assert isinstance(target, Pair)
    warp.set(target.first, np.full(32, leader, np.uint32), lanes)
    warp.set(target.second, np.arange(32) == leader, lanes)
    return None


def vote(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "vote.sync"."""
    if "sync" in ins.parts and (wait := warp.together(lanes, warp.members(ins.args[2], lanes))):
        return wait
    values = warp.get(ins.args[1], "p")[lanes.index]
    if "ballot" in ins.parts:
        bits = sum(1 << lane for lane, value in zip(lanes.list, values.tolist(), strict=True) if value)
        warp.set(ins.args[0], np.full(32, bits, np.uint32), lanes)
        return None
    if "uni" in ins.parts:
        result = values.all() or not values.any()
    else:
        result = values.all() if "all" in ins.parts else values.any()
    warp.set(ins.args[0], np.full(32, bool(result)), lanes)
    return None


def active_mask(warp: Warp, ins: Instruction, lanes: Lanes) -> None:
    """PTX ISA, "activemask"."""
    warp.set(ins.args[0], np.full(32, sum(1 << x for x in lanes.list), np.uint32), lanes)


def reduce(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "redux.sync"."""
    if wait := warp.together(lanes, warp.members(ins.args[2], lanes)):
        return wait
    op, t = ins.parts[2], ins.parts[-1]
    if t not in ("u32", "s32", "b32", "f32"):
        raise NotImplementedError(str(ins))
    x = warp.get(ins.args[1])[lanes.index]
    if t == "f32":
        x = np.abs(x.view(np.float32)) if "abs" in ins.parts else x.view(np.float32)
        of_numbers = {"min": np.fmin, "max": np.fmax}
        extreme = ({"min": np.minimum, "max": np.maximum} if "NaN" in ins.parts else of_numbers)[op].reduce(x)
        extreme = np.float32(NAN[4] if np.isnan(extreme) else extreme)
        warp.set(ins.args[0], np.full(32, extreme.view(np.uint32)), lanes)
        return None
    x = x.view(np.int32) if t == "s32" else x
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    result = int(function.reduce(x, dtype=x.dtype)) & 0xFFFFFFFF
    warp.set(ins.args[0], np.full(32, result, np.uint32), lanes)
    return None


def match(warp: Warp, ins: Instruction, lanes: Lanes) -> Wait | None:
    """PTX ISA, "match.sync"."""
    if wait := warp.together(lanes, warp.members(ins.args[2], lanes)):
        return wait
    x = warp.get(ins.args[1], ins.parts[-1]).tolist()
    equal = [sum(1 << j for j in lanes.list if x[j] == x[i]) if i in lanes.list else 0 for i in range(32)]
    target = ins.args[0]
    if "all" in ins.parts:
        same = len({x[i] for i in lanes.list}) == 1
        equal = [e if same else 0 for e in equal]
        if isinstance(target, Pair):
            warp.set(target.second, np.full(32, same), lanes)
            target = target.first
    warp.set(target, np.array(equal, np.uint32), lanes)
    return None


OPERATIONS: dict[str, Operation] = {
    "shfl": shuffle,
    "elect": elect,
    "vote": vote,
    "activemask": active_mask,
    "redux": reduce,
    "match": match,
}


def find(ins: Instruction) -> Operation | None:
    return OPERATIONS.get(ins.parts[0])
