"""LLVM's types of numbers and vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, BF16, F32 = ir.HalfType(), _BFloat(), ir.FloatType()
PTR, VOID = ir.PointerType(), ir.VoidType()
LANES = 16  # 32-bit numbers in a vector; LLVM splits it if registers are shorter


def vector(kind: Any, count: int = LANES) -> Any:
    return ir.VectorType(kind, count)


def element(kind: Any) -> Any:
    """The type of a vector's lanes, or that of a number itself."""
    return kind.element if isinstance(kind, ir.VectorType) else kind


def width(kind: Any) -> int:
    """Bits of a number."""
    return {F32: 32, F16: 16, BF16: 16}.get(kind) or int(kind.width)


def suffix(kind: Any) -> str:
    """The type in the name of an intrinsic, such as v16f32."""
    count = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    scalar = element(kind)
    return count + ({F32: "f32", F16: "f16", BF16: "bf16"}.get(scalar) or f"i{scalar.width}")
