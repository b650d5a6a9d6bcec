"""The innermost loop of a product: a block of a few rows and outputs, with sums in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pallas_kernels.llvm.code import LINE, Code
from pallas_kernels.llvm.formats import SIZES, Format
from pallas_kernels.llvm.types import F32, I8, I16, I32, I64, PTR, element, vector, width
from pallas_kernels.llvm.values import Value, Variable

AHEAD = 8192  # prefetch distance for weights in bytes
NONE, ALL, SPREAD, CONVERT = range(4)  # what a block prefetches; see `block`
CHUNK = 4096  # bytes of a row of weights that many rows are multiplied by at a time
# bytes from one converted row of a chunk to the next, so that rows take different sets of a cache
CONVERTED = CHUNK + 3 * LINE


class Operands(NamedTuple):
    """Arguments of a function that multiplies a block: addresses, and int64.

    Attributes:
        x, weight, result: addresses; x_row, weight_row, result_row: bytes from one row to the next.
        size: numbers in a row, or in a chunk of it.
        partial: vectors of sums of the chunks before, row by row.
        before, after: whether there are chunks before, and after, this one.
        row_scale: scales of rows.
        row_sum: excess of the rows' sums, if weights have an offset.
        out_scale: scales of outputs.
        out_size: bytes of a number of the result.
        ahead, rate: address of weights to prefetch, and bytes of them for 256 numbers of a row.
        converted: where weights are kept as they are multiplied, CONVERTED bytes for each output.
    """

    x: Value
    x_row: Value
    weight: Value
    weight_row: Value
    size: Value
    partial: Value
    before: Value
    after: Value
    result: Value
    result_row: Value
    row_scale: Value
    row_sum: Value
    out_scale: Value
    out_size: Value
    ahead: Value
    rate: Value
    converted: Value


KINDS = (PTR, I64, PTR, I64, I64, PTR, I64, I64, PTR, I64, PTR, PTR, PTR, I64, PTR, I64, PTR)  # of Operands


def block(code: Code, name: str, fmt: Format, rows: int, outs: int, scaled: bool, fetch: int = NONE) -> None:
    """Writes a function with this name and Operands for a block of this size.

    Args:
        scaled: whether sums are multiplied by a number for each output.
        fetch: which weights it prefetches: NONE; ALL: its own, AHEAD bytes; SPREAD: those at `ahead`;
            CONVERT: these too, and weights are stored as they are multiplied.
    """
    operands = Operands(*code.function(name, KINDS))
    xs = [operands.x + operands.x_row * row for row in range(rows)]
    weights = [operands.weight + operands.weight_row * n for n in range(outs)]
    x_size, weight_size = SIZES[fmt.x], SIZES[fmt.weight]
    sums = zeros(code, fmt, rows * outs)
    loaded = 1 if fmt.sums.count == 8 else outs  # AVX2's 16 registers have place for sums and few others
    places = [
        operands.partial + n * (width(element(fmt.sums)) * fmt.sums.count // 8) for n in range(len(sums))
    ]
    with code.when(operands.before > 0):
        for total, place in zip(sums, places, strict=True):
            total.set(code.load(fmt.sums, place))

    def multiply(at: Value, xs: Sequence[Value], weights: Sequence[Value]) -> None:
        left = [fmt.load_x(code, place) for place in xs]
        for first in range(0, outs, loaded):
            right = [fmt.load_weight(code, place) for place in weights[first : first + loaded]]
            if fetch == CONVERT:
                for n, weight in enumerate(right, first):
                    code.store(
                        weight, operands.converted + at * (4 * fmt.sums.count // fmt.step) + n * CONVERTED
                    )
            for row, x in enumerate(left):
                for total, weight in zip(sums[row * outs + first :], right, strict=False):
                    total.set(fmt.dot(code, total.get(), x, weight))

    whole = operands.size.rounded_down(fmt.step)
    with code.loop(0, whole, fmt.step) as at:
        here = [place + at * weight_size for place in weights]
        lines = range(0, fmt.step * weight_size, LINE)
        if fetch == ALL:
            for place in here:
                for line in lines:
                    code.prefetch(place + (AHEAD + line))
        if fetch in (SPREAD, CONVERT):
            for line in range(0, -(-outs * fmt.step * weight_size // (2 * LINE)) * LINE, LINE):
                code.prefetch(operands.ahead + ((at * operands.rate >> 8) + line), far=True)
        multiply(at, [place + at * x_size for place in xs], here)

    rest = operands.size - whole
    with code.when(rest > 0):  # fewer numbers than a vector has
        left = [padded(code, x + whole * x_size, rest * x_size, fmt.step * x_size) for x in xs]
        right = [
            padded(code, w + whole * weight_size, rest * weight_size, fmt.step * weight_size) for w in weights
        ]
        multiply(whole, left, right)

    with code.when(operands.after > 0):
        for total, place in zip(sums, places, strict=True):
            code.store(total.get(), place)
        code.ret()
    at_once = max(1, fmt.sums.count // outs)
    for first in range(0, rows, at_once):
        outputs = range(first, min(rows, first + at_once))
        _finish(code, fmt, totals(sums[first * outs : outputs.stop * outs]), outputs, outs, scaled, operands)


def zeros(code: Code, fmt: Format, count: int) -> list[Variable]:
    """Vectors of sums."""
    return [
        code.variable(code.constant(fmt.sums, 0.0 if element(fmt.sums) == F32 else 0)) for _ in range(count)
    ]


def padded(code: Code, place: Value, count: Value, size: int) -> Value:
    """An address of `count` bytes, followed by zeros up to `size` bytes."""
    buffer = code.memory(size)
    code.store(code.constant(vector(I8, size), 0), buffer)
    code.call("memcpy", PTR, buffer, place, count)
    return buffer


def totals(sums: Sequence[Variable]) -> Value:
    """A vector with the sum of each of these vectors, at most one per lane."""
    return joined([total.get() for total in sums], Value.__add__)


def joined(vectors: Sequence[Value], join: Callable[[Value, Value], Value]) -> Value:
    """A vector with the joined lanes of each of these vectors, at most one per lane: halves are joined
    repeatedly.
    """
    left, groups, lanes = [*vectors], 1, vectors[0].kind.count
    while lanes > 1:
        low, high = (
            [group * lanes + half * lanes // 2 + n for group in range(groups) for n in range(lanes // 2)]
            for half in (0, 1)
        )
        size = groups * lanes
        if len(left) > 1:
            left += left[:1] * (len(left) % 2)
            low, high = (places + [size + place for place in places] for places in (low, high))
            left = [
                join(first.shuffled(other, low), first.shuffled(other, high))
                for first, other in zip(left[::2], left[1::2], strict=True)
            ]
            groups *= 2
        else:
            left = [join(left[0].pick(low), left[0].pick(high))]
        lanes //= 2
    return left[0] if left[0].kind.count == len(vectors) else left[0].pick(range(len(vectors)))


def transposed(lines: list[Value]) -> list[Value]:
    """Transposes vectors, as many as each has lanes, a power of two."""
    count, half = len(lines), 1
    while half < count:
        low = [n % (2 * half) // half * count + n // (2 * half) * 2 * half + n % half for n in range(count)]
        made = list(lines)
        for n in range(count):
            if n // half % 2 == 0:
                line, other = lines[n], lines[n + half]
                made[n] = line.shuffled(other, low)
                made[n + half] = line.shuffled(other, [place + half for place in low])
        lines, half = made, 2 * half
    return lines


def _finish(
    code: Code, fmt: Format, sums: Value, outputs: range, outs: int, scaled: bool, operands: Operands
) -> None:
    """Stores these rows of a block, computed from their sums; those of bytes are times scales of rows."""

    def of_rows(place: Value, kind: Any) -> Value:
        loaded = code.load(vector(kind, len(outputs)), place + 4 * outputs.start, 4)
        return loaded.pick([row for row in range(len(outputs)) for _ in range(outs)])

    if fmt.x == "int8":
        sums = sums - of_rows(operands.row_sum, I32) if fmt.offset else sums
        sums = sums.to(vector(F32, len(outputs) * outs)) * of_rows(operands.row_scale, F32)
    if fmt.factor != 1:
        sums = sums * fmt.factor
    if scaled:
        scales = code.load(vector(F32, outs), operands.out_scale, 4)
        sums = sums * scales.pick(list(range(outs)) * len(outputs))

    store_rows(code, sums, outputs, outs, operands.result, operands.result_row, operands.out_size)


def store_rows(
    code: Code, values: Value, outputs: range, outs: int, result: Value, result_row: Value, out_size: Value
) -> None:
    """Stores these rows of a block as bfloat16 or float32."""

    def store(values: Value, align: int) -> None:
        for n, row in enumerate(outputs):
            code.store(values.pick(range(n * outs, (n + 1) * outs)), result + result_row * row, align)

    with code.if_else(out_size.equals(2)) as (half, full):
        with half:
            store(rounded(values), 2)
        with full:
            store(values, 4)


def rounded(values: Value) -> Value:
    """Rounds float32 to the bits of bfloat16, to nearest even."""
    count = values.kind.count
    bits = values.bits(vector(I32, count))
    odd = (bits >> 16) & 1
    nearest = (bits + 0x7FFF + odd) >> 16
    return values.is_number().choose(nearest, 0x7FC0).to(vector(I16, count))
