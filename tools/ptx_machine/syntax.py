"""Reads PTX text as LLVM's NVPTX back end and inline assembly write it (PTX ISA, "Syntax", "Directives")."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from tools.ptx_machine.operands import Imm, Mem, Not, Operand, Pair, Reg, Scalar, Sym, constant, split

# kinds of registers: a predicate, or a number of bits
KINDS = {"pred": "p"} | {f"{t}{n}": f"b{n}" for n in (8, 16, 32, 64) for t in "busf"}
KINDS |= {"f16x2": "b32", "bf16x2": "b32", "bf16": "b16"}
SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|clusterid|nclusterid|cluster_n?ctaid)\.[xyz]|laneid|n?warpid|lanemask_[lg][te]|lanemask_eq|"
    r"cluster_n?ctarank|n?smid|gridid|clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|(?:dynamic|total)_smem_size)"
)
LABEL = re.compile(r"([$\w%]+):(?!:)")
DIRECTIVE = re.compile(r"\.(?:loc|file|section|pragma)\b[^\n]*")
STATEMENT = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
VARIABLE = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([$\w]+)((?:\[\d*\])?)")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr(?:\s+\.(?:global|shared|const|local))?\s+(?:\.align\s+\d+\s+)?)?"
    r"([$\w]+)(?:\[(\d+)\])?"
)


@dataclass
class Instruction:
    """An instruction.

    Attributes:
        op: the opcode with its modifiers, such as `add.s32`.
        args: destination first. Vectors are tuples; None stands for `_`.
        guard: the predicate that decides, or None.
        negated: the guard decides by its opposite.
        line: of the PTX text, from 1.
        source: `file:line` of the program that the PTX was compiled from (.loc), or "".
        text: as it is written, on one line.
    """

    op: str
    args: list[Operand]
    guard: Reg | None
    negated: bool
    line: int
    source: str
    text: str
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parts = tuple(self.op.split("."))

    def __str__(self) -> str:
        return f"PTX line {self.line}: {self.text}" + (f" ({self.source})" if self.source else "")


@dataclass
class Kernel:
    """A kernel.

    Attributes:
        params: offset and size in bytes of each parameter, in order.
        registers: kind of each register: p, b8, b16, b32 or b64.
        shared: alignment and size in bytes of each shared variable.
        labels: index into the body of the instruction after each label.
        threads: most threads of a block along x, y, z (.maxntid or .reqntid); empty if it is not said.
        target: such as sm_90a.
    """

    name: str
    target: str = ""
    threads: tuple[int, ...] = ()
    params: dict[str, tuple[int, int]] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """The only kernel of a PTX module.

    Raises:
        SyntaxError: with the line, for what is no PTX, and for modules with functions, several kernels, or
            variables in global or constant memory.
    """
    return _Reader(text).kernel


@dataclass
class _Scope:
    """A block in braces: names that are declared in it, and what they are called outside."""

    number: int
    names: dict[str, str] = field(default_factory=dict)

    def declare(self, name: str) -> str:
        self.names[name] = f"{name}@{self.number}" if self.number else name
        return self.names[name]


class _Reader:
    def __init__(self, text: str) -> None:
        # comments become blanks, so that lines stay what they are
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M))
        self.kernel, at = self._head()
        self.line = self.text.count("\n", 0, at) + 1
        self.source = ""
        self.scopes = [_Scope(0)]
        self.scope_count = 0
        # with the scopes in which their names are looked up: labels may follow their use
        self.statements: list[tuple[Instruction, str, str | None, list[_Scope]]] = []
        end = self._body(at)
        if extra := re.search(r"\.(entry|func)\b", self.text[end:]):
            self._fail(f"a second .{extra[1]}", self.text.count("\n", 0, end) + 1)
        for instruction, raw, guard, scopes in self.statements:
            if guard:
                found = self._operand(guard, scopes, instruction.line)
                if not isinstance(found, Reg):
                    self._fail(f"{guard} is no predicate", instruction.line)
                instruction.guard = found
            instruction.args = [self._operand(x, scopes, instruction.line) for x in split(raw)]
            self.kernel.body.append(instruction)

    def _fail(self, what: str, line: int) -> NoReturn:
        raise SyntaxError(f"PTX line {line}: {what}")

    def _head(self) -> tuple[Kernel, int]:
        entry = re.search(r"\.entry\s+([$\w]+)\s*(?:\((.*?)\))?([^{;]*)\{", self.text, re.S)
        if entry is None:
            raise SyntaxError("no .entry in the PTX")
        before = self.text[: entry.start()]
        for kind in ("func", "global", "const"):
            if found := re.search(rf"^\s*(?:\.visible\s+|\.extern\s+|\.weak\s+)*\.{kind}\b.*", before, re.M):
                self._fail(f"{found[0].strip()}: not supported", before.count("\n", 0, found.end()) + 1)
        kernel = Kernel(entry[1])
        if target := re.search(r"^\s*\.target\s+(\w+)", before, re.M):
            kernel.target = target[1]
        if threads := re.search(r"\.(?:max|req)ntid\s+([\d, ]+)", entry[3]):
            kernel.threads = tuple(map(int, threads[1].split(",")))
        at = 0
        for raw in filter(None, map(str.strip, (entry[2] or "").split(","))):
            match = PARAMETER.fullmatch(raw)
            if match is None or match[2] not in KINDS:
                self._fail(f"parameter {raw}", before.count("\n") + 1)
            item = int(KINDS[match[2]][1:]) // 8
            align = int(match[1] or item)
            at = -(-at // align) * align
            kernel.params[match[3]] = at, item * int(match[4] or 1)
            at += item * int(match[4] or 1)
        for declaration in re.findall(r"^\s*\.extern\s+\.shared\s+([^;]+);", before, re.M):
            self._shared(kernel, declaration, 0)
        return kernel, entry.end()

    def _shared(self, kernel: Kernel, declaration: str, line: int) -> None:
        match = VARIABLE.fullmatch(" ".join(declaration.split()))
        if match is None:
            self._fail(f".shared {declaration}", line)
        item = int(KINDS[match[2]][1:]) // 8
        count = int(match[4][1:-1] or 0) if match[4] else 1
        kernel.shared[match[3]] = int(match[1] or item), item * count

    def _body(self, at: int) -> int:
        text, blank = self.text, re.compile(r"\s*")
        while True:
            found = blank.match(text, at)
            assert found is not None
            self.line += found[0].count("\n")
            at = found.end()
            if at == len(text):
                self._fail("the kernel has no end", self.line)
            if text[at] == "{":
                self.scope_count += 1
                self.scopes.append(_Scope(self.scope_count))
                at += 1
            elif text[at] == "}":
                self.scopes.pop()
                at += 1
                if not self.scopes:
                    return at
            elif label := LABEL.match(text, at):
                self.kernel.labels[self.scopes[-1].declare(label[1])] = len(self.statements)
                at = label.end()
            elif directive := DIRECTIVE.match(text, at):
                words = directive[0].replace(",", " ").split()
                if words[0] == ".loc" and words[2] != "0":
                    self.source = f"{self.files.get(words[1], words[1])}:{words[2]}"
                at = directive.end()
            else:
                end = text.find(";", at)
                if end < 0:
                    self._fail("a statement has no end", self.line)
                self._statement(" ".join(text[at:end].split()))
                self.line += text.count("\n", at, end)
                at = end + 1

    def _statement(self, statement: str) -> None:
        kernel, scope = self.kernel, self.scopes[-1]
        if not statement:
            return
        if declared := re.match(r"\.reg\s*\.(\w+) (.*)", statement):
            if declared[1] not in KINDS:
                self._fail(f"registers of type .{declared[1]} are not supported", self.line)
            for name in declared[2].replace(" ", "").split(","):
                many = re.fullmatch(r"([%$\w]+)<(\d+)>", name)
                for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    kernel.registers[scope.declare(one)] = KINDS[declared[1]]
        elif statement.startswith(".shared"):
            self._shared(kernel, statement.removeprefix(".shared").strip(), self.line)
        elif match := STATEMENT.fullmatch(statement):
            negated, guard, op, raw = match.groups()
            instruction = Instruction(op, [], None, negated == "!", self.line, self.source, statement)
            self.statements.append((instruction, raw, guard, list(self.scopes)))
        else:
            self._fail(f"{statement}: not supported", self.line)

    def _operand(self, raw: str, scopes: list[_Scope], line: int) -> Operand:
        if raw.startswith("{"):
            return tuple(self._scalar(x, scopes, line) for x in split(raw[1:-1]))
        return self._scalar(raw, scopes, line)

    def _scalar(self, raw: str, scopes: list[_Scope], line: int) -> Scalar:
        if raw == "_":
            return None
        if raw.startswith("["):
            return self._memory(raw, scopes, line)
        if "|" in raw:
            first, second = (self._scalar(x.strip(), scopes, line) for x in raw.split("|"))
            if not isinstance(first, Reg | None) or not isinstance(second, Reg | None):
                self._fail(f"operand {raw}", line)
            return Pair(first, second)
        if raw.startswith("!"):
            inner = self._scalar(raw[1:].strip(), scopes, line)
            if not isinstance(inner, Reg):
                self._fail(f"operand {raw}", line)
            return Not(inner)
        if (number := constant(raw)) is not None:
            return number
        for scope in reversed(scopes):
            if raw in scope.names:
                name = scope.names[raw]
                return Reg(name) if name in self.kernel.registers else Sym(name)
        if SPECIAL.fullmatch(raw):
            return Reg(raw)
        if raw in self.kernel.params or raw in self.kernel.shared:
            return Sym(raw)
        if match := re.fullmatch(r"([$\w]+)\s*([+-])\s*(\d+)", raw):
            base = self._scalar(match[1], scopes, line)
            if isinstance(base, Sym):
                return Sym(base.name, int(match[2] + match[3]))
        self._fail(f"operand {raw}", line)

    def _memory(self, raw: str, scopes: list[_Scope], line: int) -> Mem:
        first, *rest = split(raw[1:-1])
        place = re.fullmatch(r"(.+?)\s*(?:([+-])\s*([+-]?\w+))?", first)
        assert place is not None
        base = self._scalar(place[1], scopes, line)
        offset = int(place[3], 0) * (-1 if place[2] == "-" else 1) if place[3] else 0
        coords = self._operand(rest[0], scopes, line) if rest else None
        if not isinstance(base, Reg | Sym | Imm) or len(rest) > 1:
            self._fail(f"operand {raw}", line)
        if coords is None:
            return Mem(base, offset)
        if not isinstance(coords, tuple):
            self._fail(f"operand {raw}", line)
        given = tuple(x for x in coords if isinstance(x, Reg | Imm))
        if len(given) < len(coords):
            self._fail(f"operand {raw}", line)
        return Mem(base, offset, given)
