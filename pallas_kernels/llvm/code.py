"""Writes modules in LLVM's intermediate representation: functions, loops and memory. `values` has the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from llvmlite import ir

from pallas_kernels.llvm.types import (
    BF16,
    F32,
    I1,
    I8,
    I32,
    I64,
    LANES,
    PTR,
    VOID,
    element,
    suffix,
    vector,
    width,
)
from pallas_kernels.llvm.values import Value, Variable, constant

LINE = 64  # bytes of a cache line
BFLOAT16 = 16  # XLA's number for the dtype


class Code:
    """A module under construction. Everything is appended to the function that was begun last, which ends
    where the next one begins. Addresses are pointers, or int64, of which LLVM does not know the memory that
    they are in.
    """

    def __init__(self) -> None:
        self.module = ir.Module(context=ir.Context())
        self.builder = ir.IRBuilder()

    def text(self) -> str:
        """The text of the finished module."""
        self._end()
        return str(self.module)

    def function(
        self,
        name: str,
        kinds: Sequence[Any],
        *,
        internal: bool = True,
        inline: bool = False,
        result: Any = VOID,
    ) -> list[Value]:
        """Begins a function. Returns its arguments."""
        self._end()
        made = ir.Function(self.module, ir.FunctionType(result, kinds), name)
        if internal:
            made.linkage = "internal"
            made.attributes.add("alwaysinline" if inline else "noinline")
        self.builder = ir.IRBuilder(made.append_basic_block())
        return [Value(self.builder, argument) for argument in made.args]

    def kernel(self, name: str) -> list[Value]:
        """Begins a function of (frame, part, parts), see `calls`: the frame's address and two integers."""
        return self.function(name, [PTR, I64, I64], internal=False)

    def ret(self, result: Value | None = None) -> None:
        """Returns from the function."""
        if result is None:
            self.builder.ret_void()
        else:
            self.builder.ret(result.raw)

    def _end(self) -> None:
        if self.builder.block is not None and not self.builder.block.is_terminated:
            self.ret()

    # Values

    def constant(self, kind: Any, value: float | Sequence[float]) -> Value:
        """A number or vector. A single number is the value of all lanes."""
        return Value(self.builder, constant(kind, value))

    def whole(self, value: int) -> Value:
        return self.constant(I64, value)

    def variable(self, first: Value) -> Variable:
        return Variable(first)

    # Control flow

    @contextmanager
    def repeat(self, condition: Callable[[], Value]) -> Iterator[None]:
        """A loop, while the condition is true."""
        b = self.builder
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(condition().raw, body, after)
        b.position_at_end(body)
        yield
        b.branch(head)
        b.position_at_end(after)

    @contextmanager
    def loop(self, first: Value | int, end: Value | int, step: Value | int = 1) -> Iterator[Value]:
        """A loop over int64 values from first, while less than end."""
        at = self.variable(self._value(first))
        with self.repeat(lambda: at.get() < end):
            now = at.get()
            yield now
            at.set(now + step)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    def if_else(self, condition: Value) -> Any:
        """A context whose value is two further contexts, for true and for false."""
        return self.builder.if_else(condition.raw)

    @contextmanager
    def cases(self, value: Value) -> Iterator[Callable[[int], Any]]:
        """A context whose value is a function: of an integer, to a context for what is done if the value
        equals it.
        """
        b = self.builder
        after = b.append_basic_block("after")
        switch = b.switch(value.raw, after)

        @contextmanager
        def case(number: int) -> Iterator[None]:
            block = b.append_basic_block()
            switch.add_case(value.kind(number), block)
            b.position_at_end(block)
            yield
            b.branch(after)

        yield case
        b.position_at_end(after)

    # Calls

    def call(self, name: str, result: Any, *arguments: Value | int, flags: tuple[str, ...] = ()) -> Value:
        """Calls an intrinsic, or a function of this module or of libc. Python integers are int64."""
        raw = [self._value(argument).raw for argument in arguments]
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [value.type for value in raw]), name)
        return Value(self.builder, self.builder.call(function, raw, fastmath=flags))

    def intrinsic(self, name: str, *arguments: Value) -> Value:
        """An operation on numbers or vectors of one type, which is also that of the result, such as
        "fabs".
        """
        kind = arguments[0].kind
        return self.call(f"llvm.{name}.{suffix(kind)}", kind, *arguments)

    def reduced(self, name: str, x: Value) -> Value:
        """The lanes of a vector combined into one number, such as by "fmaximum"."""
        return self.call(f"llvm.vector.reduce.{name}.{suffix(x.kind)}", element(x.kind), x)

    def fma(self, left: Value, right: Value, to: Value) -> Value:
        """left * right + to, fused if the processor supports it."""
        return self.intrinsic("fmuladd", left, right, to)

    def pairs(self, left: Value, right: Value, to: Value) -> Value:
        """to + the sum of products of each lane's two bfloat16; vectors of 32 bits."""
        kind = vector(BF16, 2 * LANES)
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", to.kind, to, left.bits(kind), right.bits(kind))

    def sum(self, x: Value) -> Value:
        """The sum of the lanes, in any order."""
        name = f"llvm.vector.reduce.fadd.{suffix(x.kind)}"
        return self.call(name, F32, self.constant(F32, -0.0), x, flags=("reassoc",))

    # Memory

    def memory(self, size: Value | int) -> Value:
        """The address of this many bytes on the stack, aligned to a cache line. If the size is a Value, each
        execution takes further memory, until the function returns."""
        b, fixed = self.builder, isinstance(size, int)
        with b.goto_entry_block() if fixed else nullcontext():
            made = b.alloca(ir.ArrayType(I8, size)) if fixed else b.alloca(I8, self._value(size).raw)
            made.align = LINE
            untyped = ir.instructions.CastInstr(b.block, "bitcast", made, PTR)
            b._insert(untyped)
            return Value(b, untyped)

    def data(self, name: str, content: bytes) -> Value:
        """The address of constant bytes, aligned to a cache line."""
        kind = vector(I8, len(content))
        made = ir.GlobalVariable(self.module, kind, name)
        made.initializer, made.linkage, made.global_constant = constant(kind, list(content)), "internal", True
        made.align = LINE
        return Value(self.builder, made.bitcast(PTR))

    def load(self, kind: Any, place: Value, align: int = 1) -> Value:
        return Value(self.builder, self.builder.load(place.to(PTR).raw, align=align, typ=kind))

    def store(self, value: Value, place: Value, align: int = 1) -> None:
        self.builder.store(value.raw, place.to(PTR).raw, align=align)

    def word(self, place: Value, index: int, kind: Any = I64) -> Value:
        """Loads an eight-byte word of a structure."""
        return self.load(kind, place + 8 * index, 8)

    def load_some(self, kind: Any, place: Value, count: int) -> Value:
        """Loads the first lanes of a vector; the others are 0."""
        if count >= kind.count:
            return self.load(kind, place)
        name, align = f"llvm.masked.load.{suffix(kind)}.p0", self.constant(I32, 1)
        return self.call(name, kind, place.to(PTR), align, self._first(kind, count), self.constant(kind, 0))

    def store_some(self, value: Value, place: Value, count: int) -> None:
        """Stores the first lanes of a vector."""
        kind = value.kind
        if count >= kind.count:
            self.store(value, place)
            return
        name, align = f"llvm.masked.store.{suffix(kind)}.p0", self.constant(I32, 1)
        self.call(name, VOID, value, place.to(PTR), align, self._first(kind, count))

    def gather(self, kind: Any, base: Value, indices: Value) -> Value:
        """Loads the numbers with these indices relative to base."""
        size = width(kind.element) // 8
        offsets = indices.to(vector(I64, kind.count)) * size
        places = (offsets + base.to(I64).splat(kind.count)).to(vector(PTR, kind.count))
        nothing = Value(self.builder, ir.Constant(kind, ir.Undefined))
        name, every = f"llvm.masked.gather.{suffix(kind)}.v{kind.count}p0", self._first(kind, kind.count)
        return self.call(name, kind, places, self.constant(I32, size), every, nothing)

    def prefetch(self, place: Value, *, far: bool = False) -> None:
        """Prefetches a cache line into all caches; far: not into the first level, which waits for fewer lines
        at a time.
        """
        read, nearness, data = (self.constant(I32, n) for n in (0, 2 if far else 3, 1))
        self.call("llvm.prefetch.p0", VOID, place.to(PTR), read, nearness, data)

    # XLA's call frame

    def argument(self, frame: Value, index: int) -> tuple[Value, Value]:
        """Addresses of an argument's data and of its shape."""
        return self._buffer(self.word(frame, 9, PTR), index)

    def result(self, frame: Value, index: int) -> tuple[Value, Value]:
        """Addresses of a result's data and of its shape."""
        return self._buffer(self.word(frame, 14, PTR), index)

    def result_size(self, frame: Value, index: int) -> Value:
        """Bytes of a result's numbers: 2 for bfloat16, otherwise 4."""
        buffer = self.word(self.word(frame, 14, PTR), index, PTR)
        return self.load(I32, buffer + 16, 4).equals(BFLOAT16).choose(self.whole(2), 4)

    def _buffer(self, buffers: Value, index: int) -> tuple[Value, Value]:
        buffer = self.word(buffers, index, PTR)
        return self.word(buffer, 3, PTR), self.word(buffer, 5, PTR)

    def _value(self, value: Value | int) -> Value:
        return value if isinstance(value, Value) else self.whole(value)

    def _first(self, kind: Any, count: int) -> Value:
        """A mask of a vector's first lanes."""
        return self.constant(vector(I1, kind.count), [int(lane < count) for lane in range(kind.count)])


def write_parts(code: Code, name: str, axes: int, alone: int) -> None:
    """Writes a function with this name: the number of parts of a call, one if its first argument, of this
    many axes, has at most so many numbers.
    """
    frame, limit = code.function(name, [PTR, I64], internal=False, result=I64)
    _, shape = code.argument(frame, 0)
    numbers = code.word(shape, 0)
    for axis in range(1, axes):
        numbers = numbers * code.word(shape, axis)
    code.ret((numbers <= alone).choose(1, limit))


def share(count: Value, part: Value, parts: Value) -> tuple[Value, Value]:
    """First and end of a part's share of `count`."""
    return count * part // parts, count * (part + 1) // parts
