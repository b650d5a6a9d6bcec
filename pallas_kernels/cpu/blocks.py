"""The innermost loop of a product: a block of 4 rows by 4 outputs held in registers, written in LLVM's own terms.

Numba's vectorizer finds neither bfloat16 dot products nor when to ask memory for the next weights, which is where the time goes.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pallas_kernels.cpu.calls import fetch

ROWS = OUTS = 4
NEEDED = {"bfloat16": "avx512bf16", "float32": "avx512f"}  # of the processor, by the dtype of both sides
STEP = {"bfloat16": 32, "float32": 16}  # numbers in 64 bytes, of each row and output
LANES = 16


class _BFloat(ir.Type):  # type: ignore[misc]
    """llvmlite has none."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def available(dtype: str) -> bool:
    """Whether this processor has the instructions for blocks of this dtype."""
    return dtype in NEEDED and bool(llvmlite.binding.get_host_cpu_features().get(NEEDED[dtype]))


def make_block(dtype: str, ahead: int) -> Any:
    """A function for kernels: (x, first of x, weight, first of weight, out, first of out, out's row, size).

    x and weight are flat arrays of rows of `size` numbers, a multiple of STEP, bfloat16 as uint16; out, float32, gets ROWS sums in each of
    OUTS columns.

    Args:
        ahead: outputs by which weights are fetched before they are needed; 0 if they are at hand.
    """

    @intrinsic
    def block(typing, x, x_at, weight, weight_at, out, out_at, out_row, size):
        def build(context, builder, signature, args):
            x, weight, out = (context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 2, 4))
            _, x_at, _, weight_at, _, out_at, out_row, size = args
            index, end = ir.IntType(64), builder.block

            def rows(data: Any, first: Any, count: int) -> list[Any]:
                return [builder.gep(data, [builder.add(first, builder.mul(size, index(n)))]) for n in range(count)]

            xs, weights = rows(x, x_at, ROWS), rows(weight, weight_at, OUTS)
            loop, done = builder.append_basic_block("dots"), builder.append_basic_block("summed")
            builder.branch(loop)
            builder.position_at_end(loop)
            at = builder.phi(index)
            at.add_incoming(index(0), end)
            vector = ir.VectorType(ir.FloatType(), LANES)
            before = [builder.phi(vector) for _ in range(ROWS * OUTS)]
            left, right = ([_line(builder, builder.gep(row, [at]), dtype) for row in side] for side in (xs, weights))
            if ahead:
                for row in weights:
                    fetch(builder, builder.gep(row, [builder.add(at, builder.mul(size, index(ahead)))]))
            after = [_multiplied(builder, dtype, before[r * OUTS + o], left[r], right[o]) for r in range(ROWS) for o in range(OUTS)]
            next_at = builder.add(at, index(STEP[dtype]))
            at.add_incoming(next_at, loop)
            for old, new in zip(before, after, strict=True):
                old.add_incoming(ir.Constant(vector, [0.0] * LANES), end)
                old.add_incoming(new, loop)
            builder.cbranch(builder.icmp_signed("<", next_at, size), loop, done)
            builder.position_at_end(done)
            for r in range(ROWS):
                row = builder.add(out_at, builder.mul(out_row, index(r)))
                for o in range(OUTS):
                    builder.store(_total(builder, after[r * OUTS + o]), builder.gep(out, [builder.add(row, index(o))]))
            return context.get_dummy_value()

        return types.none(x, types.intp, weight, types.intp, out, types.intp, types.intp, types.intp), build

    return block


def _line(builder: Any, place: Any, dtype: str) -> Any:
    """64 bytes from there."""
    kind = ir.VectorType(place.type.pointee, STEP[dtype])
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 2
    return loaded if dtype == "float32" else builder.bitcast(loaded, ir.VectorType(_BFloat(), STEP[dtype]))


def _multiplied(builder: Any, dtype: str, total: Any, left: Any, right: Any) -> Any:
    """total + left * right, lane by lane, or by pairs of bfloat16."""
    if dtype == "bfloat16":
        name, operands = "llvm.x86.avx512bf16.dpbf16ps.512", [total, left, right]
    else:
        name, operands = "llvm.fma.v16f32", [left, right, total]
    kind = ir.FunctionType(total.type, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)


def _total(builder: Any, vector: Any) -> Any:
    number = vector.type.element
    kind = ir.FunctionType(number, [number, vector.type])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
    return builder.call(function, [number(0.0), vector], fastmath=("reassoc",))
