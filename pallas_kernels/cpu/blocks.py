"""The innermost loop of a product: a block of a few rows and outputs, with sums in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu.emit import F32, I8, I16, I32, I64, PTR, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, Format

LINE = 64  # bytes of a cache line
AHEAD = 8192  # prefetch distance for weights in bytes


@dataclass(frozen=True)
class Out:
    """Post-processing of sums before they are stored as bfloat16, rounded to nearest even, or as float32.

    Attributes:
        scaled: whether sums are multiplied by a number for each output.
        bytes: whether sums are of eight-bit numbers, and multiplied by a number for each row.
    """

    scaled: bool = False
    bytes: bool = False


# x, bytes of a row; weight, bytes of a row; numbers in a row; out, bytes of a row; scales of rows; excess of
# the rows' sums, if weights
# have an offset; scales of outputs; bytes of a number of out
ARGUMENTS = (PTR, I64, PTR, I64, I64, PTR, I64, PTR, PTR, PTR, I64)


def block(
    code: Code, name: str, how: Format, rows: int, outs: int, out: Out, *, fetched: range = range(0)
) -> None:
    """Writes a function with this name and ARGUMENTS for a block of this size.

    Args:
        fetched: outputs whose weights are prefetched.
    """
    x, x_row, weight, weight_row, size, result, result_row, row_scale, row_sum, out_scale, out_size = (
        code.function(name, ARGUMENTS)
    )
    xs = [code.at(x, code.mul(x_row, row)) for row in range(rows)]
    weights = [code.at(weight, code.mul(weight_row, n)) for n in range(outs)]
    x_size, weight_size = SIZES[how.x], SIZES[how.weight]
    zero = ir.Constant(how.sums, [0.0 if how.sums.element == F32 else 0] * how.sums.count)

    def multiplied(sums: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
        left, right = (
            [how.load_x(code, place) for place in xs],
            [how.load_weight(code, place) for place in weights],
        )
        return [
            how.dot(code, sums[r * outs + o], left[r], right[o]) for r in range(rows) for o in range(outs)
        ]

    whole = code.b.and_(size, I64(-how.step))
    with code.loop(0, whole, how.step, [zero] * (rows * outs)) as dots:
        here = [code.at(place, code.mul(dots.index, weight_size)) for place in weights]
        for n in fetched:
            for line in range(0, how.step * weight_size, LINE):
                code.fetch(code.at(here[n], AHEAD + line))
        dots.next(
            multiplied(dots.values, [code.at(place, code.mul(dots.index, x_size)) for place in xs], here)
        )

    rest = code.b.sub(size, whole)
    # the rest, smaller than a vector
    with code.loop(0, code.b.zext(code.b.icmp_signed("!=", rest, I64(0)), I64), 1, dots.results) as tail:
        left = [
            padded(code, code.at(place, code.mul(whole, x_size)), code.mul(rest, x_size), how.step * x_size)
            for place in xs
        ]
        right = [
            padded(
                code,
                code.at(p, code.mul(whole, weight_size)),
                code.mul(rest, weight_size),
                how.step * weight_size,
            )
            for p in weights
        ]
        tail.next(multiplied(tail.values, left, right))

    at_once = max(1, how.sums.count // outs)
    for first in range(0, rows, at_once):
        end = min(rows, first + at_once)
        sums = totals(code, tail.results[first * outs : end * outs])
        _finish(
            code,
            how,
            sums,
            first,
            end,
            outs,
            out,
            result,
            result_row,
            row_scale,
            row_sum,
            out_scale,
            out_size,
        )
    code.b.ret_void()


def padded(code: Code, place: Any, count: Any, size: int) -> Any:
    """An address of `count` bytes, followed by zeros up to `size` bytes."""
    buffer = code.buffer(vector(I8, size))
    code.store(constant(vector(I8, size), 0), buffer)
    code.call("memcpy", PTR, buffer, place, count)
    return buffer


def totals(code: Code, sums: Sequence[Any]) -> Any:
    """A vector with the sum of each of these vectors, at most one per lane: halves are added repeatedly."""
    left, groups, lanes = list(sums), 1, sums[0].type.count
    count = len(left)
    add = code.b.fadd if left[0].type.element == F32 else code.b.add
    while lanes > 1:
        halves = [
            [group * lanes + half * lanes // 2 + n for group in range(groups) for n in range(lanes // 2)]
            for half in (0, 1)
        ]
        width = groups * lanes
        if len(left) > 1:
            left += left[:1] * (len(left) % 2)
            halves = [places + [width + place for place in places] for places in halves]
            left = [
                add(*(code.shuffle(one, other, places) for places in halves))
                for one, other in zip(left[::2], left[1::2], strict=True)
            ]
            groups *= 2
        else:
            left = [add(*(code.shuffle(left[0], left[0], places) for places in halves))]
        lanes //= 2
    return left[0] if left[0].type.count == count else code.shuffle(left[0], left[0], range(count))


def _finish(
    code: Code,
    how: Format,
    sums: Any,
    first: int,
    end: int,
    outs: int,
    out: Out,
    result: Any,
    result_row: Any,
    row_scale: Any,
    row_sum: Any,
    out_scale: Any,
    out_size: Any,
) -> None:
    """Stores rows [first, end) of a block, computed from their sums."""
    b, rows = code.b, end - first

    def of_rows(place: Any, kind: Any) -> Any:
        loaded = code.load(code.at(place, 4 * first), vector(kind, rows), 4)
        return code.shuffle(loaded, loaded, [row for row in range(rows) for _ in range(outs)])

    if out.bytes:
        sums = b.sub(sums, of_rows(row_sum, I32)) if how.offset else sums
        sums = b.fmul(b.sitofp(sums, vector(F32, rows * outs)), of_rows(row_scale, F32))
    if how.factor != 1:
        sums = b.fmul(sums, constant(sums.type, how.factor))
    if out.scaled:
        scales = code.load(out_scale, vector(F32, outs), 4)
        sums = b.fmul(sums, code.shuffle(scales, scales, list(range(outs)) * rows))

    store_rows(code, sums, first, end, outs, result, result_row, out_size)


def store_rows(
    code: Code, values: Any, first: int, end: int, outs: int, result: Any, result_row: Any, out_size: Any
) -> None:
    """Stores rows [first, end) of a block as bfloat16 or float32."""
    b = code.b

    def stored(values: Any, size: int) -> None:
        for row in range(first, end):
            own = code.shuffle(values, values, range((row - first) * outs, (row - first + 1) * outs))
            code.store(own, code.at(result, code.mul(result_row, row)), size)

    with b.if_else(b.icmp_signed("==", out_size, I64(2))) as (yes, no):
        with yes:
            stored(rounded(code, values), 2)
        with no:
            stored(values, 4)


def rounded(code: Code, values: Any) -> Any:
    """Rounds float32 to the bits of bfloat16, to nearest even."""
    b, count = code.b, values.type.count
    bits = b.bitcast(values, vector(I32, count))
    odd = b.and_(b.lshr(bits, constant(bits.type, 16)), constant(bits.type, 1))
    nearest = b.lshr(b.add(b.add(bits, constant(bits.type, 0x7FFF)), odd), constant(bits.type, 16))
    number = b.fcmp_ordered("ord", values, values)
    return b.trunc(b.select(number, nearest, constant(bits.type, 0x7FC0)), vector(I16, count))
