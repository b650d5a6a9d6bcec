"""Checks of a kernel that need no execution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.ptx_machine.operands import Operand, Reg, Sym, registers
from tools.ptx_machine.syntax import Instruction, Kernel

# their first operand is not written, or no register
NO_RESULT = {"st", "stmatrix", "red", "bar", "barrier", "cp", "fence", "membar", "prefetch", "wgmma"}
NO_RESULT |= {"bra", "ret", "exit", "setmaxnreg", "trap"}


@dataclass(frozen=True)
class Suspicion:
    """What a check found at an instruction; `other`: a second one that it is about."""

    message: str
    instruction: Instruction
    other: Instruction | None = None


def written(ins: Instruction) -> frozenset[str]:
    """Names of registers that an instruction writes."""
    if not ins.args or ins.parts[0] in NO_RESULT or (ins.parts[0] == "mbarrier" and not _has_result(ins)):
        return frozenset()
    if ins.parts[0] == "tcgen05" and ins.parts[1] != "ld":
        return frozenset()
    return _names(ins.args[0])


def _has_result(ins: Instruction) -> bool:
    return ins.parts[1] in ("test_wait", "try_wait", "arrive", "pending_count") and isinstance(
        ins.args[0], Reg
    )


def _names(operand: Operand) -> frozenset[str]:
    return frozenset(x.name for x in registers(operand))


def read(ins: Instruction) -> frozenset[str]:
    """Names of registers that an instruction reads."""
    out = set() if ins.guard is None else {ins.guard.name}
    results = written(ins)
    accumulates = ins.parts[:2] == ("wgmma", "mma_async")
    for i, operand in enumerate(ins.args):
        if i or not results or accumulates:
            out |= _names(operand)
    return frozenset(out)


def successors(kernel: Kernel) -> list[list[int]]:
    """Indices of the instructions that may follow each."""
    out = []
    for i, ins in enumerate(kernel.body):
        after = [i + 1] if i + 1 < len(kernel.body) else []
        if ins.parts[0] == "bra":
            [label] = ins.args
            assert isinstance(label, Sym)
            after = [kernel.labels[label.name], *(after if ins.guard is not None else [])]
        elif ins.parts[0] in ("ret", "exit") and ins.guard is None:
            after = []
        out.append(after)
    return out


def flow(kernel: Kernel, entry: int, change: Callable[[int, int], int]) -> list[int | None]:
    """What may hold before each instruction, as bits: those that hold on some path to it. None: no path.

    Args:
        entry: what holds before the first.
        change: of an instruction's index and what holds before it: what holds after it.
    """
    after = successors(kernel)
    before: list[int | None] = [None] * len(kernel.body)
    work = [(0, entry)] if kernel.body else []
    while work:
        i, state = work.pop()
        known = before[i]
        if known is not None and known | state == known:
            continue
        before[i] = joined = state | (known or 0)
        changed = change(i, joined)
        work += [(j, changed) for j in after[i]]
    return before


def unfenced(kernel: Kernel) -> Iterator[Suspicion]:
    """Products of warpgroups whose registers (the accumulator, or A) are written after the last wgmma.fence
    on some path to them, or that no wgmma.fence precedes (PTX ISA, `wgmma.fence`).
    """
    used: dict[int, frozenset[str]] = {}
    for i, ins in enumerate(kernel.body):
        if ins.parts[:2] == ("wgmma", "mma_async"):
            a = ins.args[1] if isinstance(ins.args[1], tuple) else None
            used[i] = _names(ins.args[0]) | _names(a)
    bit = {name: 1 << n for n, name in enumerate(sorted(frozenset[str]().union(*used.values())), 1)}
    none = 1  # no fence yet
    writes = [
        0 if i in used else sum(bit.get(name, 0) for name in written(ins))
        for i, ins in enumerate(kernel.body)
    ]

    def change(i: int, state: int) -> int:
        return 0 if kernel.body[i].parts[:2] == ("wgmma", "fence") else state | writes[i]

    before = flow(kernel, none, change) if used else []
    for i, names in used.items():
        state = before[i] or 0
        ins = kernel.body[i]
        late = {name for name in names if state & bit[name]}
        if state & none:
            yield Suspicion("wgmma.mma_async without a wgmma.fence before it", ins)
        elif late:
            writer = next(x for x in reversed(kernel.body[:i] + kernel.body[i:]) if written(x) & late)
            yield Suspicion(
                f"{min(late)} of wgmma.mma_async is written after the last wgmma.fence", ins, writer
            )


def never_written(kernel: Kernel) -> Iterator[Suspicion]:
    """Instructions that read a register to which no path to them writes."""
    bit = {name: 1 << n for n, name in enumerate(kernel.registers)}
    writes = [sum(bit[name] for name in written(ins)) for ins in kernel.body]
    before = flow(kernel, 0, lambda i, state: state | writes[i])
    for ins, state in zip(kernel.body, before, strict=True):
        for name in sorted(read(ins)):
            if state is not None and name in bit and not state & bit[name]:
                yield Suspicion(f"{name} is read, but never written before", ins)


def suspicions(kernel: Kernel) -> list[Suspicion]:
    """All that the checks find."""
    return [*unfenced(kernel), *never_written(kernel)]
