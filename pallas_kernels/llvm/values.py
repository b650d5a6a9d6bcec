"""Numbers, vectors and addresses of generated code, combined with Python's operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.llvm.types import BF16, F16, F32, I8, I32, I64, LANES, PTR, element, vector, width

FLOATS = F32, F16, BF16


class Value:
    """A number, a vector or an address. Operators write the instruction and return its result.

    An operand may be a Python number. Integers are signed, except in `//`, `%` and `>>`, whose operands must
    not be negative. An address plus n is n bytes further.
    """

    def __init__(self, builder: Any, raw: Any) -> None:
        self.builder, self.raw = builder, raw

    @property
    def kind(self) -> Any:
        """LLVM's type."""
        return self.raw.type

    def _made(self, raw: Any) -> Value:
        return Value(self.builder, raw)

    def _other(self, other: Value | float | Sequence[float]) -> Any:
        return other.raw if isinstance(other, Value) else constant(self.kind, other)

    def _operate(self, whole: str | None, real: str | None, other: Any, turned: bool = False) -> Value:
        name = real if element(self.kind) in FLOATS else whole
        assert name is not None
        left, right = self.raw, self._other(other)
        return self._made(getattr(self.builder, name)(*((right, left) if turned else (left, right))))

    def _compare(self, sign: str, other: Any) -> Value:
        real = element(self.kind) in FLOATS
        compare = self.builder.fcmp_ordered if real else self.builder.icmp_signed
        return self._made(compare(sign, self.raw, self._other(other)))

    def __add__(self, other: Any) -> Value:
        if isinstance(other, Value) and other.kind == PTR:
            return other + self
        if self.kind == PTR:
            offset = other.raw if isinstance(other, Value) else I64(other)
            return self._made(self.builder.gep(self.raw, [offset], source_etype=I8))
        return self._operate("add", "fadd", other)

    def __sub__(self, other: Any) -> Value:
        return self._operate("sub", "fsub", other)

    def __rsub__(self, other: Any) -> Value:
        return self._operate("sub", "fsub", other, turned=True)

    def __mul__(self, other: Any) -> Value:
        return self._operate("mul", "fmul", other)

    def __truediv__(self, other: Any) -> Value:
        return self._operate(None, "fdiv", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._operate(None, "fdiv", other, turned=True)

    def __floordiv__(self, other: Any) -> Value:
        return self._operate("udiv", None, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return self._operate("udiv", None, other, turned=True)

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

    def __xor__(self, other: Any) -> Value:
        return self._operate("xor", None, other)

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

    def is_number(self) -> Value:
        """False for NaN."""
        return self._compare("ord", self)

    def below(self, other: Any) -> Value:
        """Unsigned comparison."""
        return self._made(self.builder.icmp_unsigned("<", self.raw, self._other(other)))

    def least(self, other: Any) -> Value:
        """The minimum of both."""
        return self._compare("<", other).choose(self, other)

    def most(self, other: Any) -> Value:
        """The maximum of both."""
        return self._compare(">", other).choose(self, other)

    def choose(self, yes: Any, no: Any) -> Value:
        """`yes` where this is true, otherwise `no`. At least one of them is a Value."""
        known: Value = yes if isinstance(yes, Value) else no
        return self._made(self.builder.select(self.raw, known._other(yes), known._other(no)))

    def rounded_down(self, step: int) -> Value:
        """The largest multiple of `step`, a power of two, that is not above this integer."""
        return self & -step

    def signed_shift(self, bits: int) -> Value:
        """Shifts to the right and keeps the sign."""
        return self._operate("ashr", None, bits)

    def bits(self, kind: Any) -> Value:
        """These bits as another type."""
        return self._made(self.builder.bitcast(self.raw, kind))

    def to(self, kind: Any) -> Value:
        """Converts a number to another type, and an address to an int64 or back; integers keep their sign."""
        mine, other, b = element(self.kind), element(kind), self.builder
        if mine == other:
            return self
        if PTR in (mine, other):
            name = "inttoptr" if other == PTR else "ptrtoint"
        elif mine in FLOATS and other in FLOATS:
            name = "fpext" if width(mine) < width(other) else "fptrunc"
        elif mine in FLOATS or other in FLOATS:
            name = "fptosi" if mine in FLOATS else "sitofp"
        else:
            name = "sext" if width(mine) < width(other) else "trunc"
        return self._made(getattr(b, name)(self.raw, kind))

    def unsigned_to(self, kind: Any) -> Value:
        """Converts an integer, which is not negative, to a wider type."""
        return self._made(self.builder.zext(self.raw, kind))

    def lane(self, index: int) -> Value:
        return self._made(self.builder.extract_element(self.raw, I32(index)))

    def pick(self, lanes: Sequence[int]) -> Value:
        """A vector of these lanes."""
        return self.shuffled(self, lanes)

    def shuffled(self, other: Value, lanes: Sequence[int]) -> Value:
        """A vector of these lanes of both, concatenated."""
        places = ir.Constant(vector(I32, len(lanes)), list(lanes))
        return self._made(self.builder.shuffle_vector(self.raw, other.raw, places))

    def splat(self, count: int = LANES) -> Value:
        """A vector with this number in every lane."""
        nothing = ir.Constant(vector(self.kind, count), ir.Undefined)
        return self._made(self.builder.insert_element(nothing, self.raw, I32(0))).pick([0] * count)


class Variable:
    """A value that the code may change, such as between iterations of a loop."""

    def __init__(self, first: Value) -> None:
        self.builder, self.kind = first.builder, first.kind
        with self.builder.goto_entry_block():
            self.place = self.builder.alloca(self.kind)
        self.set(first)

    def set(self, value: Value) -> None:
        self.builder.store(value.raw, self.place)

    def get(self) -> Value:
        return Value(self.builder, self.builder.load(self.place, typ=self.kind))


def constant(kind: Any, value: float | Sequence[float]) -> Any:
    """LLVM's constant. A single number is the value of all lanes of a vector."""
    if isinstance(kind, ir.VectorType) and not isinstance(value, Sequence):
        value = [value] * kind.count
    return ir.Constant(kind, value if isinstance(value, (int, float)) else list(value))
