"""The transform of `pallas_kernels/hadamard.py` on a CPU: sums and differences, in registers as far as
possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import rounded
from pallas_kernels.cpu.emit import F32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, Processor, as_floats, processor
from pallas_kernels.hadamard import gain

ALONE = 1 << 15  # numbers up to which one thread is faster than two
HELD = {16: 8, 8: 4, 4: 4}  # vectors summed at once, by their number of lanes


def transform_module(target: native.Target, x: str, block: int) -> str:
    """The functions `transform` and `transform_parts` of x [rows, in]. Results: x's dtype, and float32 for
    storing sums.
    """
    at, code = processor(target), Code()
    transform_row(code, at, x, block)
    write_parts(code, "transform_parts")
    frame, part, parts = code.function("transform", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (source, shape), (result, _), (sums, _) = (
        code.argument(frame, 0),
        code.result(frame, 0),
        code.result(frame, 1),
    )
    rows, size = code.word(shape, 0), code.word(shape, 1)
    first, end = (b.sdiv(code.mul(rows, n), parts) for n in (part, code.add(part, 1)))
    lanes = min(at.lanes, gain(block))
    with code.loop(first, end, 1) as each:
        start = code.mul(each.index, size)
        row, target_row = code.at(sums, code.mul(start, 4)), code.at(result, code.mul(start, SIZES[x]))
        code.call("transform_row", VOID, code.at(source, code.mul(start, SIZES[x])), row, size)
        with code.loop(0, size, lanes) as numbers:
            values = code.load(code.at(row, code.mul(numbers.index, 4)), vector(F32, lanes), 4)
            values = rounded(code, values) if x == "bfloat16" else values
            code.store(values, code.at(target_row, code.mul(numbers.index, SIZES[x])))
    b.ret_void()
    return str(code.module)


def write_parts(code: Code, name: str) -> None:
    """Writes a function with this name: the number of parts for work on the rows of a call's first
    argument.
    """
    frame, most = code.function(name, [I64] * 2, internal=False, result=I64)
    _, shape = code.argument(code.b.inttoptr(frame, PTR), 0)
    few = code.b.icmp_signed("<=", code.mul(code.word(shape, 0), code.word(shape, 1)), I64(ALONE))
    code.b.ret(code.b.select(few, I64(1), most))


def transform_row(code: Code, at: Processor, x: str, block: int) -> None:
    """Writes the function `transform_row`: a row of x, float32 [in] for the output, and in, a multiple of
    block.
    """
    source, target, size = code.function("transform_row", (PTR, PTR, I64))
    two = gain(block)
    lanes = min(at.lanes, two)
    held = min(HELD.get(at.lanes, 4), two // lanes)
    first = lanes * held
    with code.loop(0, size, first) as chunk:
        place = code.at(source, code.mul(chunk.index, SIZES[x]))
        values = [as_floats(code, at, code.at(place, n * lanes * SIZES[x]), x, lanes) for n in range(held)]
        stride = 1
        while stride < lanes:
            values = [_within(code, value, stride) for value in values]
            stride *= 2
        _store(code, _between(code, values), code.at(target, code.mul(chunk.index, 4)), 4 * lanes)
    stride = first
    while stride < two:
        held = min(HELD.get(at.lanes, 4), two // stride)
        with code.loop(0, size, stride * held) as chunk, code.loop(0, stride, lanes) as part:
            place = code.at(target, code.mul(code.add(chunk.index, part.index), 4))
            values = [code.load(code.at(place, 4 * n * stride), vector(F32, lanes), 4) for n in range(held)]
            _store(code, _between(code, values), place, 4 * stride)
        stride *= held
    while stride < block:  # factors of three
        with code.loop(0, size, 3 * stride) as chunk, code.loop(0, stride, lanes) as part:
            place = code.at(target, code.mul(code.add(chunk.index, part.index), 4))
            values = [code.load(code.at(place, 4 * n * stride), vector(F32, lanes), 4) for n in range(3)]
            _store(code, _reflected(code, values), place, 4 * stride)
        stride *= 3
    code.b.ret_void()


def _within(code: Code, value: Any, stride: int) -> Any:
    """Combines each lane with the one whose index differs in one bit: the sum where the bit is 0, the
    difference where it is 1."""
    lanes = range(value.type.count)
    other = code.shuffle(value, value, [lane ^ stride for lane in lanes])
    signs = ir.Constant(value.type, [-1.0 if lane & stride else 1.0 for lane in lanes])
    return code.b.fadd(other, code.b.fmul(value, signs))


def _between(code: Code, values: Sequence[Any]) -> list[Any]:
    out, stride = list(values), 1
    while stride < len(out):
        for low in (n for n in range(len(out)) if not n & stride):
            left, right = out[low], out[low + stride]
            out[low], out[low + stride] = code.b.fadd(left, right), code.b.fsub(left, right)
        stride *= 2
    return out


def _reflected(code: Code, values: Sequence[Any]) -> list[Any]:
    """Three values, minus two thirds of their sum."""
    b = code.b
    part = b.fmul(b.fadd(b.fadd(values[0], values[1]), values[2]), constant(values[0].type, 2 / 3))
    return [b.fsub(value, part) for value in values]


def _store(code: Code, values: Sequence[Any], place: Any, stride: int) -> None:
    for n, value in enumerate(values):
        code.store(value, code.at(place, n * stride), 4)
