"""LLVM's intermediate representation written with Python's operators: numbers, vectors, loops and variables
of one function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.emit import BF16, F32, I8, I32, I64, PTR, VOID

LANES = 16  # 32-bit numbers in a vector; LLVM splits it if registers are shorter
I1 = ir.IntType(1)
ROUNDING = 1.5 * 2.0**23  # float32 numbers of about this size have no fractional digits


def vector(kind: Any, count: int = LANES) -> Any:
    return ir.VectorType(kind, count)


class Value:
    """A number, an address (an int64) or a vector. Operators also accept Python numbers; integers are
    signed.
    """

    __array_priority__ = 1

    def __init__(self, code: Kernel, raw: Any) -> None:
        self.code, self.raw = code, raw

    @property
    def kind(self) -> Any:
        return self.raw.type

    def _other(self, other: Value | float | Sequence[float]) -> Any:
        return other.raw if isinstance(other, Value) else self.code.constant(self.kind, other).raw

    def _operate(self, whole: str, real: str | None, other: Any, turned: bool = False) -> Value:
        name = real if _element(self.kind) == F32 else whole
        assert name is not None
        left, right = self.raw, self._other(other)
        return Value(
            self.code, getattr(self.code.builder, name)(*((right, left) if turned else (left, right)))
        )

    def _compare(self, sign: str, other: Any) -> Value:
        compare = (
            self.code.builder.fcmp_ordered if _element(self.kind) == F32 else self.code.builder.icmp_signed
        )
        return Value(self.code, compare(sign, self.raw, self._other(other)))

    def __add__(self, other: Any) -> Value:
        return self._operate("add", "fadd", other)

    def __sub__(self, other: Any) -> Value:
        return self._operate("sub", "fsub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._operate("sub", "fsub", other, turned=True)

    def __mul__(self, other: Any) -> Value:
        return self._operate("mul", "fmul", other)

    def __truediv__(self, other: Any) -> Value:
        return self._operate("sdiv", "fdiv", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._operate("sdiv", "fdiv", other, turned=True)

    def __floordiv__(self, other: Any) -> Value:
        return self._operate("udiv", None, other)

    def __mod__(self, other: Any) -> Value:
        return self._operate("urem", None, other)

    def __lshift__(self, other: Any) -> Value:
        return self._operate("shl", None, other)

    def __rshift__(self, other: Any) -> Value:
        return self._operate("lshr", None, other)

    def __and__(self, other: Any) -> Value:
        return self._operate("and_", None, other)

    def __or__(self, other: Any) -> Value:
        return self._operate("or_", None, other)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Value:
        return self._compare("==", other)

    def below(self, other: Any) -> Value:
        """Unsigned comparison."""
        return Value(self.code, self.code.builder.icmp_unsigned("<", self.raw, self._other(other)))

    def least(self, other: Any) -> Value:
        """The minimum of both."""
        smaller: Value = (self < other).choose(self, other)
        return smaller

    def most(self, other: Any) -> Value:
        larger: Value = (self > other).choose(self, other)
        return larger

    def choose(self, yes: Value, no: Any) -> Value:
        """`yes` where this is true, otherwise `no`."""
        return Value(self.code, self.code.builder.select(self.raw, yes.raw, yes._other(no)))

    def bits(self, kind: Any) -> Value:
        return Value(self.code, self.code.builder.bitcast(self.raw, kind))

    def to(self, kind: Any) -> Value:
        """Converts the number to another kind; integers keep their sign."""
        mine, other, b = _element(self.kind), _element(kind), self.code.builder
        if mine == other:
            return self
        if F32 in (mine, other):
            if BF16 in (mine, other):
                return Value(self.code, (b.fpext if other == F32 else b.fptrunc)(self.raw, kind))
            return Value(self.code, (b.sitofp if other == F32 else b.fptosi)(self.raw, kind))
        return Value(self.code, (b.sext if mine.width < other.width else b.trunc)(self.raw, kind))

    def unsigned_to(self, kind: Any) -> Value:
        return Value(self.code, self.code.builder.zext(self.raw, kind))

    def shuffled(self, other: Value, lanes: Sequence[int]) -> Value:
        """These lanes of both, concatenated."""
        return Value(
            self.code,
            self.code.builder.shuffle_vector(
                self.raw, other.raw, ir.Constant(vector(I32, len(lanes)), list(lanes))
            ),
        )

    def splat(self, count: int = LANES) -> Value:
        b, kind = self.code.builder, vector(self.kind, count)
        one = b.insert_element(ir.Constant(kind, ir.Undefined), self.raw, I32(0))
        return Value(self.code, b.shuffle_vector(one, one, ir.Constant(vector(I32, count), [0] * count)))


class Variable:
    """A value that may change between iterations of a loop."""

    def __init__(self, code: Kernel, first: Value) -> None:
        self.code = code
        with code.builder.goto_entry_block():
            self.place = code.builder.alloca(first.kind)
        self.kind = first.kind
        self.set(first)

    def set(self, value: Value) -> None:
        self.code.builder.store(value.raw, self.place)

    def get(self) -> Value:
        return Value(self.code, self.code.builder.load(self.place, typ=self.kind))


class Kernel:
    """A module with one void function of int64 arguments. Code is appended at its end."""

    def __init__(self, name: str, arguments: int) -> None:
        self.module = ir.Module(name, context=ir.Context())
        self.function = ir.Function(self.module, ir.FunctionType(VOID, [I64] * arguments), name)
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        start = self.function.append_basic_block("start")
        self.builder.branch(start)
        self.builder.position_at_end(start)
        self.arguments = [Value(self, argument) for argument in self.function.args]

    def text(self) -> str:
        """The text of the finished module."""
        self.builder.ret_void()
        return str(self.module)

    def constant(self, kind: Any, value: float | Sequence[float]) -> Value:
        if isinstance(kind, ir.VectorType) and not isinstance(value, Sequence):
            value = [value] * kind.count
        return Value(self, ir.Constant(kind, value))

    def whole(self, value: int) -> Value:
        return self.constant(I64, value)

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def memory(self, size: int) -> Value:
        """The address of this many bytes on the stack, aligned to a cache line."""
        with self.builder.goto_entry_block():
            place = self.builder.alloca(ir.ArrayType(I8, size))
            place.align = 64
            return Value(self, self.builder.ptrtoint(place, I64))

    def load(self, kind: Any, address: Value, align: int = 1) -> Value:
        return Value(self, self.builder.load(self._place(address), align=align, typ=kind))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        self.builder.store(value.raw, self._place(address), align=align)

    def argument(self, frame: Value, index: int) -> tuple[Value, Value]:
        """Addresses of an argument's data and of its shape in XLA's call frame."""
        return self._buffer(self.load(I64, frame + 9 * 8), index)

    def result(self, frame: Value, index: int) -> tuple[Value, Value]:
        return self._buffer(self.load(I64, frame + 14 * 8), index)

    def _buffer(self, buffers: Value, index: int) -> tuple[Value, Value]:
        buffer = self.load(I64, buffers + index * 8)
        return self.load(I64, buffer + 3 * 8), self.load(I64, buffer + 5 * 8)

    def load_some(self, kind: Any, address: Value, count: int) -> Value:
        """Loads the first lanes of a vector; the others are 0."""
        if count >= kind.count:
            return self.load(kind, address)
        mask, zeros = self._mask(kind, count), ir.Constant(kind, [0] * kind.count)
        return self.call(
            f"llvm.masked.load.{_suffix(kind)}.p0", kind, [self._place(address), I32(1), mask, zeros]
        )

    def store_some(self, value: Value, address: Value, count: int) -> None:
        """Stores the first lanes of a vector."""
        if count >= value.kind.count:
            self.store(value, address)
            return
        arguments = [value.raw, self._place(address), I32(1), self._mask(value.kind, count)]
        self.call(f"llvm.masked.store.{_suffix(value.kind)}.p0", VOID, arguments)

    def gather(self, kind: Any, base: Value, indices: Value) -> Value:
        """Loads the numbers with these indices relative to base."""
        kinds, b = vector(PTR, kind.count), self.builder
        offsets = indices.to(vector(I64, kind.count)) * (_width(kind.element) // 8) + base.splat(kind.count)
        pointers = b.inttoptr(offsets.raw, kinds)
        all_lanes, nothing = (
            ir.Constant(vector(I1, kind.count), [1] * kind.count),
            ir.Constant(kind, ir.Undefined),
        )
        name = f"llvm.masked.gather.{_suffix(kind)}.v{kind.count}p0"
        return self.call(name, kind, [pointers, I32(_width(kind.element) // 8), all_lanes, nothing])

    def prefetch(self, address: Value) -> None:
        """Prefetches a cache line."""
        self.call("llvm.prefetch.p0", VOID, [self._place(address), I32(0), I32(3), I32(1)])

    def call(self, name: str, result: Any, arguments: Sequence[Any], flags: tuple[str, ...] = ()) -> Value:
        raw = [argument.raw if isinstance(argument, Value) else argument for argument in arguments]
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [one.type for one in raw]), name)
        return Value(self, self.builder.call(function, raw, fastmath=flags))

    def fma(self, left: Value, right: Value, to: Value) -> Value:
        """left * right + to, fused if the processor supports it."""
        return self.call(f"llvm.fmuladd.{_suffix(to.kind)}", to.kind, [left, right, to])

    def pairs(self, left: Value, right: Value, to: Value) -> Value:
        """to + the sum of products of each lane's two bfloat16; vectors of 32 bits."""
        kind = vector(BF16, 2 * LANES)
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", to.kind, [to, left.bits(kind), right.bits(kind)])

    def sum(self, x: Value) -> Value:
        zero = self.constant(F32, -0.0)
        return self.call(f"llvm.vector.reduce.fadd.{_suffix(x.kind)}", F32, [zero, x], ("reassoc",))

    def largest(self, x: Value) -> Value:
        return self.call(f"llvm.vector.reduce.fmax.{_suffix(x.kind)}", F32, [x], ("nnan", "nsz"))

    @contextmanager
    def loop(self, first: Value | int, end: Value | int, step: int = 1) -> Iterator[Value]:
        """A loop over int64 values from first, while less than end."""
        b = self.builder
        start, stop = (x.raw if isinstance(x, Value) else I64(x) for x in (first, end))
        body, after, before = b.append_basic_block("loop"), b.append_basic_block("looped"), b.block
        b.cbranch(b.icmp_signed("<", start, stop), body, after)
        b.position_at_end(body)
        at = b.phi(I64)
        at.add_incoming(start, before)
        yield Value(self, at)
        following = b.add(at, I64(step))
        at.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, stop), body, after)
        b.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    def _place(self, address: Value) -> Any:
        return self.builder.inttoptr(address.raw, PTR)

    def _mask(self, kind: Any, count: int) -> Any:
        return ir.Constant(vector(I1, kind.count), [int(lane < count) for lane in range(kind.count)])


def _element(kind: Any) -> Any:
    return kind.element if isinstance(kind, ir.VectorType) else kind


def _width(kind: Any) -> int:
    return 32 if kind == F32 else 16 if kind == BF16 else int(kind.width)


def _suffix(kind: Any) -> str:
    count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    element = _element(kind)
    return count + ("f32" if element == F32 else "bf16" if element == BF16 else f"i{element.width}")
