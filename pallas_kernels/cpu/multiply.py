"""Products x [rows, in] @ weight [out, in].T as functions of (frame, part, parts), block by block, for any
number of rows.

For a few rows, each block of outputs is multiplied by all rows before the next, so that weights are read from
memory once, in storage order, and are prefetched. For many rows, a panel of outputs stays in the L2 cache
while it is multiplied by all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import AHEAD, ARGUMENTS, Out, block, padded
from pallas_kernels.cpu.emit import F32, I8, I32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import (
    SIZES,
    Format,
    Processor,
    as_floats,
    as_pairs,
    byte_format,
    plain_format,
    processor,
)
from pallas_kernels.cpu.hadamard import transform_row, write_parts

FEW = 48  # maximum rows for which reading weights dominates
CONVERTED_FEW = 16  # the same if each block's weights are converted first
PANEL, SCRATCH = 64, 1 << 17  # maximum outputs; bytes of converted weights on the stack
NONE, ALL, LOWER, UPPER = range(4)  # the outputs of a block whose weights a strip of rows prefetches
STRIP = 8  # larger than any strip
LONGEST = 64  # numbers in the longest vector
SMALLEST, RECIPROCAL = 1e-30, 1 / 127  # as in `quantized`


def product_module(target: native.Target, x: str, weight: str) -> str:
    """The function `multiply` of x, weight and, for eight bits, the weight's scale [out]."""
    at, code = processor(target), Code()
    how, out = plain_format(at, x, weight), Out(scaled=SIZES[weight] == 1)
    computed = "bfloat16" if at.pairs and x == "bfloat16" and weight != "float32" else "float32"
    _multiply(code, at, how, out, None if computed == weight else computed)
    return str(code.module)


def bytes_module(target: native.Target, x: str, hadamard: int = 1) -> str:
    """The functions `quantize`, `quantize_parts` and `multiply` of x, int8 weight and its scale.

    Results: out, bytes of x, their scales and their sums [rows]; with a hadamard block above 1, also x
    transformed, float32.
    """
    at, code = processor(target), Code()
    how = byte_format(at)
    quantize(code, at, x, 1, 2, sums=(how.offset, 3) if how.offset else None, transformed=(hadamard, 4))
    _multiply(code, at, how, Out(scaled=True, bytes=True), None)
    return str(code.module)


def _multiply(code: Code, at: Processor, how: Format, out: Out, converted: str | None) -> None:
    """Args: converted: the dtype to which weights are converted once, if they are multiplied by more rows
    than a block has.
    """
    dispatch(code, "strip", at, how, out, (NONE, ALL) if converted else (NONE, ALL, LOWER, UPPER))
    if converted:
        inner = replace(plain_format(at, how.x, converted), factor=how.factor)
        dispatch(code, "converted", at, inner, out, (NONE,))
        _convert(code, at, how.weight, converted)
    frame, part, parts = code.function("multiply", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (x, _), (weight, shape) = code.argument(frame, 0), code.argument(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, (count, size) = code.word(result_shape, 0), (code.word(shape, index) for index in (0, 1))
    out_scale = code.argument(frame, 2)[0] if out.scaled else x
    row_scale = row_sum = x
    if out.bytes:
        x, row_scale, row_sum = (code.result(frame, index)[0] for index in (1, 2, 3))
    x_row, weight_row = (code.mul(size, SIZES[kind]) for kind in (how.x, how.weight))
    out_size = code.result_size(frame, 0)
    result_row = code.mul(count, out_size)
    units = b.sdiv(code.add(count, at.outs - 1), I64(at.outs))
    first = code.mul(b.sdiv(code.mul(units, part), parts), at.outs)
    end = code.least(count, code.mul(b.sdiv(code.mul(units, code.add(part, 1)), parts), at.outs))
    many = b.icmp_signed(">", rows, I64(at.rows))
    # start of the last block
    last = b.select(b.icmp_signed(">", count, I64(at.outs)), b.sub(count, I64(at.outs)), I64(0))
    most, full = I64(PANEL), b.icmp_signed(">=", count, I64(at.outs))
    paired = b.and_(
        full, b.or_(b.icmp_signed("==", rows, I64(8)), b.icmp_signed(">=", rows, I64(2 * at.rows)))
    )
    inner_row, scratch = weight_row, weight
    if converted:
        inner_row = code.mul(b.and_(code.add(size, LONGEST - 1), I64(-LONGEST)), SIZES[converted])
        fit = b.and_(b.sdiv(I64(SCRATCH), inner_row), I64(-at.outs))
        most = code.least(most, b.select(b.icmp_signed(">", fit, I64(at.outs)), fit, I64(at.outs)))
    panel = b.select(b.icmp_signed(">", rows, I64(CONVERTED_FEW if converted else FEW)), most, I64(at.outs))
    if converted:
        scratch = code.buffer(I8, b.select(many, code.mul(inner_row, panel), I64(0)))

    with code.loop(first, end, panel) as panels:
        over = code.least(code.add(panels.index, panel), end)
        begin = code.least(panels.index, last)  # the last blocks may overlap: both compute equal results
        if converted:
            with b.if_then(many):
                args = (
                    code.at(weight, code.mul(begin, weight_row)),
                    weight_row,
                    size,
                    b.sub(over, begin),
                    scratch,
                    inner_row,
                )
                code.call("convert", VOID, *args)
        with strips(code, at, rows) as (row, height), code.loop(begin, over, at.outs) as outs:
            o = code.least(
                outs.index, b.select(b.icmp_signed("==", begin, last), last, b.sub(over, I64(at.outs)))
            )
            passed = [
                code.at(x, code.mul(row, x_row)),
                x_row,
                code.at(weight, code.mul(o, weight_row)),
                weight_row,
                size,
                code.at(result, code.add(code.mul(row, result_row), code.mul(o, out_size))),
                result_row,
                code.at(row_scale, code.mul(row, 4)),
                code.at(row_sum, code.mul(row, 4)),
                code.at(out_scale, code.mul(o, 4)),
                out_size,
                height,
                code.least(b.sub(over, o), at.outs),
            ]
            # Two strips prefetch half of the weights each, so that memory is busy while the second is
            # multiplied.
            second = b.and_(paired, b.icmp_signed("<=", row, I64(at.rows)))
            first = b.icmp_signed("==", row, I64(0))
            fetch = b.select(
                first, b.select(paired, I64(LOWER), I64(ALL)), b.select(second, I64(UPPER), I64(NONE))
            )
            if converted:
                taken = list(passed)
                taken[2:4] = code.at(scratch, code.mul(b.sub(o, begin), inner_row)), inner_row
                with b.if_else(many) as (yes, no):
                    with yes:
                        code.call("converted", VOID, *taken, I64(NONE))
                    with no:
                        code.call("strip", VOID, *passed, fetch)
            else:
                code.call("strip", VOID, *passed, fetch)
    b.ret_void()


@contextmanager
def strips(code: Code, at: Processor, rows: Any) -> Iterator[tuple[Any, Any]]:
    """A loop over strips of rows: the first row, and the number of rows, one of `heights`."""
    b, before = code.b, code.b.block
    head, body, done = (b.append_basic_block(name) for name in ("strip", "rows", "done"))
    b.branch(head)
    b.position_at_end(head)
    row = b.phi(I64)
    row.add_incoming(I64(0), before)
    b.cbranch(b.icmp_signed("<", row, rows), body, done)
    b.position_at_end(body)
    left, height = b.sub(rows, row), I64(1)
    for count in heights(at)[1:]:
        height = b.select(b.icmp_signed(">=", left, I64(count)), I64(count), height)
    # rather than six and two
    height = b.select(b.icmp_signed("==", left, I64(8)), I64(min(4, at.rows)), height)
    yield row, height
    row.add_incoming(b.add(row, height), b.block)
    b.branch(head)
    b.position_at_end(done)


def heights(at: Processor) -> list[int]:
    return [count for count in (1, 2, 4, 6) if count <= at.rows]


def dispatch(code: Code, name: str, at: Processor, how: Format, out: Out, fetches: Sequence[int]) -> None:
    """A function of ARGUMENTS, the number of rows (one of `heights`), the number of outputs (at most a
    block's), and the prefetch mode."""
    half, made = at.outs // 2, {}
    fetched = {NONE: range(0), ALL: range(at.outs), LOWER: range(half), UPPER: range(half, at.outs)}
    for fetch in fetches:
        for rows in heights(at):
            if fetch in (NONE, ALL) or rows in (min(4, at.rows), at.rows):
                made[rows + fetch * STRIP] = f"{name}_{rows}_{fetch}"
                block(code, f"{name}_{rows}_{fetch}", how, rows, at.outs, out, fetched=fetched[fetch])
    block(code, f"{name}_single", how, 1, 1, out)
    *args, rows, outs, fetch = code.function(name, (*ARGUMENTS, I64, I64, I64))
    b = code.b
    x, x_row, weight, weight_row, _, result, result_row, row_scale, row_sum, out_scale, out_size = args
    with b.if_then(b.icmp_signed("<", outs, I64(at.outs))):  # a weight with fewer outputs
        with code.loop(0, rows, 1) as row, code.loop(0, outs, 1) as each:
            own = list(args)
            own[0], own[2] = (
                code.at(x, code.mul(row.index, x_row)),
                code.at(weight, code.mul(each.index, weight_row)),
            )
            own[5] = code.at(
                result, code.add(code.mul(row.index, result_row), code.mul(each.index, out_size))
            )
            own[7], own[8] = (code.at(place, code.mul(row.index, 4)) for place in (row_scale, row_sum))
            own[9] = code.at(out_scale, code.mul(each.index, 4))
            code.call(f"{name}_single", VOID, *own)
        b.ret_void()
    done = b.append_basic_block("done")
    switch = b.switch(code.add(rows, code.mul(fetch, STRIP)), done)
    for number, block_name in made.items():
        case = b.append_basic_block()
        switch.add_case(I64(number), case)
        b.position_at_end(case)
        code.call(block_name, VOID, *args)
        b.branch(done)
    b.position_at_end(done)
    b.ret_void()


def _convert(code: Code, at: Processor, stored: str, converted: str) -> None:
    """Converts rows of weights to another dtype, each padded to LONGEST."""
    weight, row, size, count, into, into_row = code.function("convert", (PTR, I64, I64, I64, PTR, I64))
    b, step = code.b, 2 * at.lanes

    def written(source: Any, target: Any) -> None:
        parts = [
            as_floats(code, at, code.at(source, part * at.lanes * SIZES[stored]), stored, at.lanes)
            for part in (0, 1)
        ]
        # only eight-bit numbers are converted to bfloat16, and it represents them exactly
        if converted == "bfloat16":
            code.store(as_pairs(code, *parts), target)
            return
        for part, values in enumerate(parts):
            code.store(values, code.at(target, part * at.lanes * SIZES[converted]))

    whole = b.and_(size, I64(-step))
    rest = b.sub(size, whole)
    with code.loop(0, count, 1) as each:
        source, target = (
            code.at(weight, code.mul(each.index, row)),
            code.at(into, code.mul(each.index, into_row)),
        )
        with code.loop(0, whole, step) as numbers:
            place = code.at(source, code.mul(numbers.index, SIZES[stored]))
            code.fetch(code.at(place, AHEAD))
            written(place, code.at(target, code.mul(numbers.index, SIZES[converted])))
        with b.if_then(b.icmp_signed("!=", rest, I64(0))):
            tail = padded(
                code,
                code.at(source, code.mul(whole, SIZES[stored])),
                code.mul(rest, SIZES[stored]),
                step * SIZES[stored],
            )
            written(tail, code.at(target, code.mul(whole, SIZES[converted])))
    b.ret_void()


def quantize(
    code: Code,
    at: Processor,
    x: str,
    bytes_result: int,
    scales_result: int,
    sums: tuple[int, int] | None = None,
    transformed: tuple[int, int] = (1, 0),
) -> None:
    """Quantizes rows of x to bytes: bit-identical to `quantized.quantize` as compiled by XLA, which
    multiplies by reciprocals.

    Writes the functions `quantize`, and `quantize_parts`, which returns the number of parts.

    Args:
        sums: (factor, result): also stores each row's sum of bytes, times the factor.
        transformed: (block, result): transforms rows first, if block is more than 1.
    """
    hadamard, own = transformed
    stored, x = x, "float32" if hadamard > 1 else x
    if hadamard > 1:
        transform_row(code, at, stored, hadamard)
    write_parts(code, "quantize_parts")
    frame, part, parts = code.function("quantize", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    source, shape = code.argument(frame, 0)
    into, scales = code.result(frame, bytes_result)[0], code.result(frame, scales_result)[0]
    rows, size = code.word(shape, 0), code.word(shape, 1)
    whole = b.and_(size, I64(-at.lanes))

    def largest(place: Any, lanes: int, known: Any) -> Any:
        values = as_floats(code, at, place, x, lanes)
        values = code.call(f"llvm.fabs.v{lanes}f32", values.type, values)
        return code.call(f"llvm.maximum.v{lanes}f32", values.type, values, known)

    def written(place: Any, lanes: int, inverse: Any, target: Any) -> Any:
        values = b.fmul(as_floats(code, at, place, x, lanes), code.splat(inverse, lanes))
        values = b.fptosi(code.call(f"llvm.rint.v{lanes}f32", values.type, values), vector(I32, lanes))
        code.store(b.trunc(values, vector(I8, lanes)), target)
        return values

    first, end = (b.sdiv(code.mul(rows, n), parts) for n in (part, code.add(part, 1)))
    with code.loop(first, end, 1) as each:
        start = code.mul(each.index, size)
        row, target = code.at(source, code.mul(start, SIZES[stored])), code.at(into, start)
        if hadamard > 1:
            spread = code.at(code.result(frame, own)[0], code.mul(start, 4))
            code.call("transform_row", VOID, row, spread, size)
            row = spread
        with code.loop(0, whole, at.lanes, [constant(vector(F32, at.lanes), SMALLEST)]) as numbers:
            numbers.next(
                [largest(code.at(row, code.mul(numbers.index, SIZES[x])), at.lanes, numbers.values[0])]
            )
        most = code.call(f"llvm.vector.reduce.fmaximum.v{at.lanes}f32", F32, numbers.results[0])
        with code.loop(whole, size, 1, [code.splat(most, 1)]) as tail:
            tail.next([largest(code.at(row, code.mul(tail.index, SIZES[x])), 1, tail.values[0])])
        scale = b.fmul(b.extract_element(tail.results[0], I32(0)), F32(RECIPROCAL))
        inverse = b.fdiv(F32(1.0), scale)
        code.store(scale, code.at(scales, code.mul(each.index, 4)), 4)
        with code.loop(0, whole, at.lanes, [constant(vector(I32, at.lanes), 0)]) as numbers:
            place = code.at(row, code.mul(numbers.index, SIZES[x]))
            numbers.next(
                [b.add(numbers.values[0], written(place, at.lanes, inverse, code.at(target, numbers.index)))]
            )
        total = code.call(f"llvm.vector.reduce.add.v{at.lanes}i32", I32, numbers.results[0])
        with code.loop(whole, size, 1, [total]) as tail:
            value = written(
                code.at(row, code.mul(tail.index, SIZES[x])), 1, inverse, code.at(target, tail.index)
            )
            tail.next([b.add(tail.values[0], b.extract_element(value, I32(0)))])
        if sums is not None:
            factor, index = sums
            code.store(
                b.mul(tail.results[0], I32(factor)),
                code.at(code.result(frame, index)[0], code.mul(each.index, 4)),
                4,
            )
    b.ret_void()
