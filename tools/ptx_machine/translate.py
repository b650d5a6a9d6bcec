"""Translates a kernel to steps: straight runs of arithmetic become Python functions on arrays of 32 lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tools.ptx_machine import arithmetic, numbers
from tools.ptx_machine.conversions import GENERIC_PARAM
from tools.ptx_machine.numbers import Array
from tools.ptx_machine.operands import Imm, Not, Operand, Reg, Sym
from tools.ptx_machine.rules import RULES, Assignment, Unsupported
from tools.ptx_machine.syntax import Instruction, Kernel

SHARED_BASE = 1024  # where shared variables begin: the driver keeps the first kilobyte of sm_90's blocks
DTYPES: dict[str, Any] = {
    "p": np.bool_,
    "b8": numbers.u1,
    "b16": numbers.u2,
    "b32": numbers.u4,
    "b64": numbers.u8,
}
# the order of a warp's special registers: S[i] is an array of 32 uint32
SPECIAL = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%nwarpid"),
    *("%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt"),
    *(
        f"%{name}.{axis}"
        for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
        for axis in "xyz"
    ),
    *("%cluster_ctarank", "%cluster_nctarank", "%dynamic_smem_size", "%total_smem_size"),
)
# Instructions that touch memory or other threads, by their first part.
OPERATIONS = {"ld", "st", "ldmatrix", "stmatrix", "mma", "wgmma", "bar", "barrier", "mbarrier", "cp", "fence"}
OPERATIONS |= {"membar", "red", "atom", "prefetch", "applypriority", "shfl", "vote", "elect", "activemask"}
OPERATIONS |= {"redux", "match", "setmaxnreg", "nanosleep", "griddepcontrol", "trap", "tcgen05"}
BRANCHES = {"bra": "branch", "ret": "return", "exit": "return"}
NAMES = {name: value for module in (numbers, arithmetic) for name, value in vars(module).items()}

type Kind = Literal["alu", "branch", "return", "operation"]


def _nothing(*_: object) -> None:
    raise TypeError("only runs of arithmetic are computed")


@dataclass(slots=True)
class Step:
    """A step of a program.

    Attributes:
        kind: alu: a run of arithmetic. branch, return: as the guard says. operation: anything else.
        instructions: of the run; otherwise the only one.
        count: of instructions.
        fast: computes a run for all 32 lanes: fast(R, S).
        masked: computes a run for the lanes of a mask: masked(R, S, mask).
        target: the step to which a branch goes.
    """

    kind: Kind
    instructions: tuple[Instruction, ...]
    count: int = 1
    fast: Callable[[list[Array], list[Array]], None] = _nothing
    masked: Callable[[list[Array], list[Array], Array], None] = _nothing
    target: int = -1
    instruction: Instruction = field(init=False)  # the first
    line: int = field(init=False)

    def __post_init__(self) -> None:
        self.instruction = self.instructions[0]
        self.line = self.instruction.line


@dataclass
class Program:
    """A kernel as steps.

    Registers are R[index[name]]: contiguous arrays of 32 unsigned numbers of the register's width, or of 32
    bools. Nobody changes such an array in place: registers share them. All must hold an array before the
    program starts. Steps run under `np.errstate(all="ignore")`.

    Attributes:
        index: of each register.
        kinds: p, b8, b16, b32 or b64, of each register.
        shared: address in shared memory of each shared variable.
        labels: step of each label.
    """

    kernel: Kernel
    index: dict[str, int]
    kinds: list[str]
    shared: dict[str, int]
    steps: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def address(self, symbol: Sym) -> int:
        """The address of a shared variable in shared memory, or the generic address of a parameter."""
        if symbol.name in self.shared:
            return self.shared[symbol.name] + symbol.offset
        return GENERIC_PARAM + self.kernel.params[symbol.name][0] + symbol.offset


def translate(kernel: Kernel) -> Program:
    """Raises:
    Unsupported: the kernel has an instruction that is not known; names it and its line.
    """
    shared, at = {}, SHARED_BASE
    for name, (align, size) in kernel.shared.items():
        at = -(-at // align) * align
        shared[name] = at
        at += size
    index = {name: i for i, name in enumerate(kernel.registers)}
    program = Program(kernel, index, list(kernel.registers.values()), shared)
    _Translator(program).run()
    return program


class _Translator:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Any] = dict(NAMES)  # of the functions that are made
        self.constants: dict[tuple[int, str], str] = {}
        self.count = 0

    def run(self) -> None:
        kernel, steps = self.program.kernel, self.program.steps
        at: dict[int, list[str]] = {}
        for label, i in kernel.labels.items():
            at.setdefault(i, []).append(label)
        straight: list[Instruction] = []
        for i, ins in enumerate([*kernel.body, None]):
            branch = ins is not None and ins.parts[0] in BRANCHES
            if straight and (ins is None or i in at or branch or ins.parts[0] in OPERATIONS):
                self._close(straight)
                straight = []
            for label in at.get(i, ()):
                self.program.labels[label] = len(steps)
            if ins is None:
                break
            if ins.parts[0] in OPERATIONS:
                steps.append(Step("operation", (ins,)))
            elif branch:
                steps.append(Step("branch" if ins.parts[0] == "bra" else "return", (ins,)))
            elif ins.parts[0] in RULES:
                straight.append(ins)
            else:
                supported = " ".join(sorted({*RULES, *OPERATIONS, *BRANCHES}))
                raise Unsupported(f"{ins}: {ins.parts[0]} is not supported. Supported: {supported}")
        for step in steps:
            if step.kind == "branch":
                [to] = step.instruction.args
                if not isinstance(to, Sym) or to.name not in self.program.labels:
                    raise Unsupported(f"{step.instruction}: no such label")
                step.target = self.program.labels[to.name]

    def _close(self, straight: list[Instruction]) -> None:
        step = Step("alu", tuple(straight), len(straight))
        self.program.steps.append(step)
        lines = self._lines(step, None)  # now, so that what is not supported is found

        # compiled when they are needed: most runs are never masked, and some are never reached
        def fast(registers: list[Array], special: list[Array]) -> None:
            step.fast = self._compiled("R, S", lines)
            step.fast(registers, special)

        def masked(registers: list[Array], special: list[Array], mask: Array) -> None:
            step.masked = self._compiled("R, S, m", self._lines(step, "m"))
            step.masked(registers, special, mask)

        step.fast, step.masked = fast, masked

    def _lines(self, step: Step, mask: str | None) -> list[str]:
        run = _Run(self, mask)
        for ins in step.instructions:
            try:
                run.add(ins)
            except (Unsupported, ValueError) as problem:  # another number of operands
                raise Unsupported(f"{ins}: {problem}") from None
        return run.finished()

    def _compiled(self, arguments: str, lines: list[str]) -> Callable[..., None]:
        text = "\n ".join([f"def run({arguments}):", *lines])
        exec(compile(text, f"<{self.program.kernel.name}>", "exec"), self.names)
        made: Callable[..., None] = self.names.pop("run")
        return made

    def constant(self, bits: int, type: str) -> str:
        """The name of an array of 32 equal numbers."""
        dtype = np.dtype(bool) if type == "p" else np.dtype(type)
        cut = bits & ((1 << 8 * dtype.itemsize) - 1)
        if type != "p" and (cut, type) not in self.constants:
            raw = np.full(32, cut, f"u{dtype.itemsize}").view(dtype)
            self.constants[cut, type] = self.array(raw)
        elif type == "p":
            self.constants[cut, type] = self.array(np.full(32, bool(bits)))
        return self.constants[cut, type]

    def array(self, values: Array) -> str:
        self.count += 1
        name = f"k{self.count}"
        values.flags.writeable = False
        self.names[name] = values
        return name


class _Run:
    """A function's lines. Registers are kept in local variables, in each type in which they were needed."""

    def __init__(self, translator: _Translator, mask: str | None) -> None:
        self.translator, self.program, self.mask = translator, translator.program, mask
        self.lines: list[str] = []
        self.local: dict[tuple[int, str], str] = {}  # register, type
        self.written: list[int] = []

    def add(self, ins: Instruction) -> None:
        made: list[Assignment] = RULES[ins.parts[0]](ins, self)
        mask = self.mask
        if ins.guard is not None:
            guard = ("~" if ins.negated else "") + self.use(ins.guard, "p")
            mask = f"{mask} & {guard}" if mask else guard
        values = []
        for target, type, expression in made:
            if not isinstance(target, Reg) or target.name not in self.program.index:
                raise Unsupported(f"cannot write {target}")
            register = self.program.index[target.name]
            own = self.kind(target)
            if own[1:] != type[1:]:
                raise Unsupported(f"{target.name} has {own}, the result is {type}")
            if mask:
                raw = expression if type == own else f"({expression}).view({own})"
                values.append((register, own, f"merge({mask}, {raw}, {self.use(target, own)})"))
            else:
                values.append((register, type, expression))
        # an instruction reads all operands before it writes
        names = [f"t{i}" for i in range(len(values))] if len(values) > 1 else []
        self.lines += [f"{name} = {e}" for name, (_, _, e) in zip(names, values, strict=False)]
        for i, (register, type, expression) in enumerate(values):
            self._assign(register, type, names[i] if names else expression)

    def _assign(self, register: int, type: str, expression: str) -> None:
        for key in [key for key in self.local if key[0] == register]:
            del self.local[key]
        name = self.local[register, type] = f"r{register}{type}"
        self.lines.append(f"{name} = {expression}")
        if register not in self.written:
            self.written.append(register)

    def finished(self) -> list[str]:
        out = list(self.lines)
        for register in self.written:
            own = self._own(register)
            if (name := self.local.get((register, own))) is None:
                name = next(x for (r, _), x in self.local.items() if r == register)
                name = f"{name}.view({own})"
            out.append(f"R[{register}] = {name}")
        return out or ["pass"]

    def _own(self, register: int) -> str:
        return _unsigned(self.program.kinds[register])

    # ---- rules.Operands

    def array(self, values: Array) -> str:
        return self.translator.array(values)

    def kind(self, operand: Operand) -> str:
        if not isinstance(operand, Reg):
            raise Unsupported(f"{operand}: must be a register")
        if operand.name in SPECIAL:
            return "u4"
        return self._own(self.program.index[operand.name])

    def use(self, operand: Operand, type: str) -> str:
        match operand:
            case Imm(bits, width):
                return self.translator.constant(_float_bits(bits, width, type), type)
            case Sym():
                return self.translator.constant(self.program.address(operand), type)
            case Not(inner):
                return f"~{self.use(inner, type)}"
            case Reg(name) if name in self.program.index:
                return self._register(self.program.index[name], type)
            case Reg(name) if name in SPECIAL:
                return _as(f"S[{SPECIAL.index(name)}]", "u4", type)
        raise Unsupported(f"{getattr(operand, 'name', operand)} is not supported")

    def _register(self, register: int, type: str) -> str:
        key = register, type
        if key not in self.local:
            own = self._own(register)
            if type == own:
                expression = f"R[{register}]"
                if found := next((x for (r, _), x in self.local.items() if r == register), None):
                    expression = f"{found}.view({own})"
            else:
                expression = _as(self._register(register, own), own, type)
            self.local[key] = f"r{register}{type}"
            self.lines.append(f"r{register}{type} = {expression}")
        return self.local[key]


def _unsigned(kind: str) -> str:
    return kind if kind == "p" else f"u{int(kind[1:]) // 8}"


def _as(expression: str, own: str, type: str) -> str:
    """An array of unsigned numbers as another type of the same or a smaller size."""
    if own == type:
        return expression
    if "p" in (own, type) or int(own[1:]) < int(type[1:]):
        raise Unsupported(f"a register of {own} is read as {type}")
    if own[1:] != type[1:]:
        expression = f"{expression}.astype(u{type[1:]})"
    return expression if type[0] == "u" else f"{expression}.view({type})"


def _float_bits(bits: int, width: int, type: str) -> int:
    """A constant's bits: PTX writes float32 constants for smaller and larger floats in their own bits."""
    if width == 64 and type == "f4":
        return int(np.array([bits], np.uint64).view(np.float64).astype(np.float32).view(np.uint32)[0])
    if width == 32 and type == "f8":
        return int(np.array([bits], np.uint32).view(np.float32).astype(np.float64).view(np.uint64)[0])
    return bits


__all__ = [
    "DTYPES",
    "OPERATIONS",
    "SHARED_BASE",
    "SPECIAL",
    "Program",
    "Step",
    "Unsupported",
    "translate",
]
