"""The transform of `quantization/hadamard.py` on a CPU: sums and differences, in registers as far as
possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import rounded
from pallas_kernels.llvm.code import Code, share, write_parts
from pallas_kernels.llvm.formats import SIZES, Processor, as_floats, processor
from pallas_kernels.llvm.types import F32, I64, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.quantization.hadamard import gain

ALONE = 1 << 15  # numbers up to which one thread is faster than two
HELD = {16: 8, 8: 4, 4: 4}  # vectors summed at once, by their number of lanes


def transform_module(target: native.Target, x: str, block: int) -> str:
    """The functions `transform` and `transform_parts` of x [rows, in]. Results: x's dtype, and float32 for
    storing sums.
    """
    at, code = processor(target), Code()
    transform_row(code, at, x, block)
    write_parts(code, "transform_parts", 2, ALONE)
    frame, part, parts = code.kernel("transform")
    (source, shape), (result, _), (sums, _) = (
        code.argument(frame, 0),
        code.result(frame, 0),
        code.result(frame, 1),
    )
    rows, size = code.word(shape, 0), code.word(shape, 1)
    lanes = min(at.lanes, gain(block))
    with code.loop(*share(rows, part, parts)) as each:
        start = each * size
        row, target_row = sums + start * 4, result + start * SIZES[x]
        code.call("transform_row", VOID, source + start * SIZES[x], row, size)
        with code.loop(0, size, lanes) as n:
            values = code.load(vector(F32, lanes), row + n * 4, 4)
            code.store(rounded(values) if x == "bfloat16" else values, target_row + n * SIZES[x])
    return code.text()


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
        place = source + chunk * SIZES[x]
        values = [as_floats(code, at, place + n * lanes * SIZES[x], x, lanes) for n in range(held)]
        stride = 1
        while stride < lanes:
            values = [_within(code, value, stride) for value in values]
            stride *= 2
        _store(code, _between(values), target + chunk * 4, 4 * lanes)
    stride = first
    while stride < two:
        held = min(HELD.get(at.lanes, 4), two // stride)
        with code.loop(0, size, stride * held) as chunk, code.loop(0, stride, lanes) as part:
            place = target + (chunk + part) * 4
            values = [code.load(vector(F32, lanes), place + 4 * n * stride, 4) for n in range(held)]
            _store(code, _between(values), place, 4 * stride)
        stride *= held
    while stride < block:  # factors of three
        with code.loop(0, size, 3 * stride) as chunk, code.loop(0, stride, lanes) as part:
            place = target + (chunk + part) * 4
            values = [code.load(vector(F32, lanes), place + 4 * n * stride, 4) for n in range(3)]
            _store(code, _reflected(values), place, 4 * stride)
        stride *= 3


def _within(code: Code, value: Value, stride: int) -> Value:
    """Combines each lane with the one whose index differs in one bit: the sum where the bit is 0, the
    difference where it is 1."""
    lanes = range(value.kind.count)
    signs = code.constant(value.kind, [-1.0 if lane & stride else 1.0 for lane in lanes])
    return value.pick([lane ^ stride for lane in lanes]) + value * signs


def _between(values: Sequence[Value]) -> list[Value]:
    out, stride = list(values), 1
    while stride < len(out):
        for low in (n for n in range(len(out)) if not n & stride):
            left, right = out[low], out[low + stride]
            out[low], out[low + stride] = left + right, left - right
        stride *= 2
    return out


def _reflected(values: Sequence[Value]) -> list[Value]:
    """Three values, minus two thirds of their sum."""
    first, second, third = values
    part = (first + second + third) * (2 / 3)
    return [value - part for value in values]


def _store(code: Code, values: Sequence[Value], place: Value, stride: int) -> None:
    for n, value in enumerate(values):
        code.store(value, place + n * stride, 4)
