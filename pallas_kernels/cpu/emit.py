"""Writes functions in LLVM's terms from Python: additions to llvmlite's builder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

I8, I16, I32, I64, F32, VOID = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.VoidType(),
)
HALF = ir.HalfType()
PTR = ir.PointerType()
BFLOAT16 = 16  # XLA's number for the dtype


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


@dataclass
class Loop:
    """Attributes: index: the counter; values: results of the previous iteration; results: of the last
    iteration, after the loop."""

    index: Any
    values: list[Any]
    results: list[Any] = field(default_factory=list)

    def next(self, values: Sequence[Any]) -> None:
        self.results = list(values)


class Code:
    """A module under construction. `b` builds at the end of the last function begun. Python integers in
    arguments become i64."""

    def __init__(self) -> None:
        self.module = ir.Module(context=ir.Context())
        self.b = ir.IRBuilder()

    def function(
        self, name: str, kinds: Sequence[Any], *, internal: bool = True, result: Any = VOID
    ) -> list[Any]:
        """Begins a function. Returns its arguments."""
        made = ir.Function(self.module, ir.FunctionType(result, kinds), name)
        if internal:
            made.linkage = "internal"
            made.attributes.add("noinline")
        self.b = ir.IRBuilder(made.append_basic_block())
        return list(made.args)

    def call(self, name: str, kind: Any, *args: Any) -> Any:
        """Calls an intrinsic, or a function of this module or of libc."""
        known = self.module.globals.get(name)
        known = known or ir.Function(self.module, ir.FunctionType(kind, [arg.type for arg in args]), name)
        return self.b.call(known, args)

    @contextmanager
    def loop(self, start: Any, end: Any, step: Any, values: Sequence[Any] = ()) -> Iterator[Loop]:
        """A loop like range(start, end, step), with values carried between iterations; does nothing if start
        >= end.
        """
        b, start, end, step = self.b, number(start), number(end), number(step)
        before = b.block
        head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        phis = [b.phi(value.type) for value in values]
        b.cbranch(b.icmp_signed("<", index, end), body, done)
        b.position_at_end(body)
        loop = Loop(index, phis, list(phis))
        yield loop
        following = b.add(index, step)
        for phi, first, last in zip(
            [index, *phis], [start, *values], [following, *loop.results], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(last, b.block)
        b.branch(head)
        b.position_at_end(done)
        loop.results = phis

    def at(self, base: Any, offset: Any) -> Any:
        """The address `offset` bytes after `base`."""
        return self.b.gep(base, [number(offset)], source_etype=I8)

    def buffer(self, kind: Any, count: Any = None, align: int = 64) -> Any:
        """Stack memory, of fixed size unless `count` is given."""
        with self.b.goto_entry_block() if count is None else nullcontext():
            return self._untyped(self.b.alloca(kind, count), align)

    def _untyped(self, made: Any, align: int) -> Any:
        made.align = align
        untyped = ir.instructions.CastInstr(self.b.block, "bitcast", made, PTR)
        self.b._insert(untyped)
        return untyped

    def load(self, place: Any, kind: Any, align: int = 1) -> Any:
        loaded = self.b.load(place, typ=kind)
        loaded.align = align
        return loaded

    def store(self, value: Any, place: Any, align: int = 1) -> None:
        self.b.store(value, place).align = align

    def word(self, place: Any, index: int, kind: Any = I64) -> Any:
        """Loads a word of a structure."""
        return self.load(self.at(place, 8 * index), kind, 8)

    def argument(self, frame: Any, index: int) -> tuple[Any, Any]:
        """Addresses of an argument's data and of its shape in XLA's call frame."""
        return self._buffer(self.word(frame, 9, PTR), index)

    def result(self, frame: Any, index: int) -> tuple[Any, Any]:
        return self._buffer(self.word(frame, 14, PTR), index)

    def result_size(self, frame: Any, index: int) -> Any:
        """Bytes of a result's numbers: 2 for bfloat16, otherwise 4."""
        buffer = self.word(self.word(frame, 14, PTR), index, PTR)
        half = self.b.icmp_signed("==", self.load(self.at(buffer, 16), I32, 4), I32(BFLOAT16))
        return self.b.select(half, I64(2), I64(4))

    def _buffer(self, buffers: Any, index: int) -> tuple[Any, Any]:
        buffer = self.word(buffers, index, PTR)
        return self.word(buffer, 3, PTR), self.word(buffer, 5, PTR)

    def least(self, left: Any, right: Any) -> Any:
        left, right = number(left), number(right)
        return self.b.select(self.b.icmp_signed("<", left, right), left, right)

    def mul(self, left: Any, right: Any) -> Any:
        return self.b.mul(number(left), number(right))

    def add(self, left: Any, right: Any) -> Any:
        return self.b.add(number(left), number(right))

    def fetch(self, place: Any) -> None:
        """Prefetches the cache line of an address."""
        self.call("llvm.prefetch.p0", VOID, place, I32(0), I32(3), I32(1))  # read, all cache levels, data

    def splat(self, value: Any, count: int) -> Any:
        kind = ir.VectorType(value.type, count)
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.shuffle(first, first, [0] * count)

    def shuffle(self, left: Any, right: Any, places: Sequence[int]) -> Any:
        return self.b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(places)), list(places)))


def number(value: Any) -> Any:
    return I64(value) if isinstance(value, int) else value


def constant(kind: Any, value: Any) -> Any:
    """A vector with this value in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def vector(kind: Any, count: int) -> Any:
    return ir.VectorType(kind, count)
