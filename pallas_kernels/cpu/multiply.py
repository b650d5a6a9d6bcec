"""Products x [rows, in] @ weight [out, in].T as functions of (frame, part, parts), block by block, for any number of rows.

For a few rows each block of outputs is multiplied by all rows before the next, so that weights come from memory once, in the order in which
they lie, and are asked for ahead. For many rows a panel of outputs stays in the second cache while rows pass by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import ARGUMENTS, Out, block, padded, rounded, totals
from pallas_kernels.cpu.emit import F32, I8, I32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, Format, Processor, as_floats, byte_format, plain_format, processor

AHEAD = 8  # outputs by which weights are fetched before they are needed
FEW = 48  # rows, up to which weights are what memory is read for
CONVERTED_FEW = 16  # and where each block's weights are converted first
PANEL, SCRATCH = 64, 1 << 17  # outputs at most; bytes of the converted, which lie on the stack
LONGEST = 64  # numbers in the longest vector
SMALLEST, RECIPROCAL = 1e-30, 1 / 127  # as in `quantized`


def product_module(target: native.Target, x: str, weight: str) -> str:
    """The function `multiply` of arguments x, weight and, of eight bits, the weight's scale [out]."""
    at, code = processor(target), Code()
    how, out = plain_format(at, x, weight), Out(scaled=SIZES[weight] == 1)
    computed = "bfloat16" if at.pairs and x == "bfloat16" and weight != "float32" else "float32"
    _multiply(code, at, how, out, None if computed == weight else computed)
    return str(code.module)


def bytes_module(target: native.Target, x: str) -> str:
    """The functions `quantize` and `multiply` of x, int8 weight and its scale; results are out, bytes of x and their scales [rows]."""
    at, code = processor(target), Code()
    how = byte_format(at)
    quantize(code, at, x, how.x, 1, 2)
    _multiply(code, at, how, Out(scaled=True, bytes=True), None)
    return str(code.module)


def _multiply(code: Code, at: Processor, how: Format, out: Out, converted: str | None) -> None:
    """Args: converted: the dtype that weights become, once, where they are multiplied by more than a block's rows."""
    _dispatch(code, "first", at, how, out, fetching=True)
    _dispatch(code, "next", at, how, out, fetching=False)
    if converted:
        inner = replace(plain_format(at, how.x, converted), factor=how.factor)
        _dispatch(code, "converted", at, inner, out, fetching=False)
        _convert(code, at, how.weight, converted)
    if out.bytes:
        _correct(code, how)
    frame, part, parts = code.function("multiply", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (x, _), (weight, shape) = code.argument(frame, 0), code.argument(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, (count, size) = code.word(result_shape, 0), (code.word(shape, index) for index in (0, 1))
    out_scale = code.argument(frame, 2)[0] if out.scaled else x
    row_scale = x
    if out.bytes:
        x, row_scale = code.result(frame, 1)[0], code.result(frame, 2)[0]
    x_row, weight_row = (code.mul(size, SIZES[kind]) for kind in (how.x, how.weight))
    out_size = code.result_size(frame, 0)
    result_row = code.mul(count, out_size)
    units = b.sdiv(code.add(count, at.outs - 1), I64(at.outs))
    first = code.mul(b.sdiv(code.mul(units, part), parts), at.outs)
    end = code.least(count, code.mul(b.sdiv(code.mul(units, code.add(part, 1)), parts), at.outs))
    many = b.icmp_signed(">", rows, I64(at.rows))
    last = b.select(b.icmp_signed(">", count, I64(at.outs)), b.sub(count, I64(at.outs)), I64(0))  # where the last block begins
    most = I64(PANEL)
    corrections = code.buffer(vector(I32, PANEL))
    ahead = b.select(b.icmp_signed("==", rows, I64(1)), I64(0), code.mul(weight_row, AHEAD))
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
        begin = code.least(panels.index, last)  # the last blocks may overlap: what is computed twice is the same
        if out.bytes:
            code.call(
                "correct", VOID, code.at(weight, code.mul(begin, weight_row)), weight_row, size, b.sub(over, begin), corrections, ahead
            )
        if converted:
            with b.if_then(many):
                args = code.at(weight, code.mul(begin, weight_row)), weight_row, size, b.sub(over, begin), scratch, inner_row, ahead
                code.call("convert", VOID, *args)
        with _strips(code, at, rows) as (row, height), code.loop(begin, over, at.outs) as outs:
            o = code.least(outs.index, b.select(b.icmp_signed("==", begin, last), last, b.sub(over, I64(at.outs))))
            passed = [
                code.at(x, code.mul(row, x_row)),
                x_row,
                code.at(weight, code.mul(o, weight_row)),
                weight_row,
                size,
                code.at(result, code.add(code.mul(row, result_row), code.mul(o, out_size))),
                result_row,
                code.at(row_scale, code.mul(row, 4)),
                code.at(out_scale, code.mul(o, 4)),
                code.at(corrections, code.mul(b.sub(o, begin), 4)),
                ahead,
                out_size,
                height,
                code.least(b.sub(over, o), at.outs),
            ]
            if converted:
                taken = list(passed)
                taken[2:4] = code.at(scratch, code.mul(b.sub(o, begin), inner_row)), inner_row
                _either(code, many, ("converted", taken), ("first", passed))
            else:
                _either(code, b.icmp_signed("==", row, I64(0)), ("first", passed), ("next", passed))
    b.ret_void()


def _either(code: Code, condition: Any, *calls: tuple[str, Sequence[Any]]) -> None:
    """The first of two calls if the condition holds, else the second."""
    with code.b.if_else(condition) as branches:
        for branch, (name, args) in zip(branches, calls, strict=True):
            with branch:
                code.call(name, VOID, *args)


@contextmanager
def _strips(code: Code, at: Processor, rows: Any) -> Iterator[tuple[Any, Any]]:
    """For each strip of rows: its first, and how many it has, one of `heights`."""
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
    height = b.select(b.icmp_signed("==", left, I64(8)), I64(min(4, at.rows)), height)  # rather than six and two
    yield row, height
    row.add_incoming(b.add(row, height), b.block)
    b.branch(head)
    b.position_at_end(done)


def heights(at: Processor) -> list[int]:
    return [count for count in (1, 2, 4, 6) if count <= at.rows]


def _dispatch(code: Code, name: str, at: Processor, how: Format, out: Out, *, fetching: bool) -> None:
    """A function of ARGUMENTS and of how many rows, one of `heights`, and outputs there are, at most a block's."""
    for rows in heights(at):
        block(code, f"{name}_{rows}", how, rows, at.outs, out, fetching=fetching)
    block(code, f"{name}_single", how, 1, 1, out, fetching=False)
    *args, rows, outs = code.function(name, (*ARGUMENTS, I64, I64))
    b = code.b
    x, x_row, weight, weight_row, _, result, result_row, row_scale, out_scale, corrections, _, out_size = args
    with b.if_then(b.icmp_signed("<", outs, I64(at.outs))):  # of a weight that has no more
        with code.loop(0, rows, 1) as row, code.loop(0, outs, 1) as each:
            own = list(args)
            own[0], own[2] = code.at(x, code.mul(row.index, x_row)), code.at(weight, code.mul(each.index, weight_row))
            own[5] = code.at(result, code.add(code.mul(row.index, result_row), code.mul(each.index, out_size)))
            own[7] = code.at(row_scale, code.mul(row.index, 4))
            own[8], own[9] = (code.at(place, code.mul(each.index, 4)) for place in (out_scale, corrections))
            code.call(f"{name}_single", VOID, *own)
        b.ret_void()
    done = b.append_basic_block("done")
    switch = b.switch(rows, done)
    for count in heights(at):
        case = b.append_basic_block()
        switch.add_case(I64(count), case)
        b.position_at_end(case)
        code.call(f"{name}_{count}", VOID, *args)
        b.branch(done)
    b.position_at_end(done)
    b.ret_void()


def _convert(code: Code, at: Processor, stored: str, converted: str) -> None:
    """Rows of weights to rows of another dtype, each filled up to LONGEST."""
    weight, row, size, count, into, into_row, ahead = code.function("convert", (PTR, I64, I64, I64, PTR, I64, I64))
    b, step = code.b, 2 * at.lanes

    def written(source: Any, target: Any) -> None:
        for part in (0, 1):
            values = as_floats(code, at, code.at(source, part * at.lanes * SIZES[stored]), stored, at.lanes)
            values = rounded(code, values) if converted == "bfloat16" else values
            code.store(values, code.at(target, part * at.lanes * SIZES[converted]))

    whole = b.and_(size, I64(-step))
    rest = b.sub(size, whole)
    with code.loop(0, count, 1) as each:
        source, target = code.at(weight, code.mul(each.index, row)), code.at(into, code.mul(each.index, into_row))
        with code.loop(0, whole, step) as numbers:
            place = code.at(source, code.mul(numbers.index, SIZES[stored]))
            code.fetch(code.at(place, ahead))
            written(place, code.at(target, code.mul(numbers.index, SIZES[converted])))
        with b.if_then(b.icmp_signed("!=", rest, I64(0))):
            tail = padded(code, code.at(source, code.mul(whole, SIZES[stored])), code.mul(rest, SIZES[stored]), step * SIZES[stored])
            written(tail, code.at(target, code.mul(whole, SIZES[converted])))
    b.ret_void()


def _correct(code: Code, how: Format) -> None:
    """128 times the sums of rows of weights, by which sums of products are too large where bytes of x are; or zeros."""
    weight, row, size, count, into, ahead = code.function("correct", (PTR, I64, I64, I64, PTR, I64))
    b, whole = code.b, code.b.and_(size, I64(-how.step))
    rest, zero = b.sub(size, whole), constant(how.sums, 0)
    offset = constant(vector(I8, how.step), -128)
    with code.loop(0, count, 1) as each:
        source = code.at(weight, code.mul(each.index, row))
        if how.x == "uint8":
            with code.loop(0, whole, how.step, [zero]) as dots:
                place = code.at(source, dots.index)
                code.fetch(code.at(place, ahead))
                dots.next([how.dot(code, dots.values[0], offset, how.load_weight(code, place))])
            with code.loop(0, b.zext(b.icmp_signed("!=", rest, I64(0)), I64), 1, dots.results) as tail:
                last = how.load_weight(code, padded(code, code.at(source, whole), rest, how.step))
                tail.next([how.dot(code, tail.values[0], offset, last)])
            total = b.extract_element(totals(code, tail.results), I32(0))
        else:
            total = I32(0)
        code.store(total, code.at(into, code.mul(each.index, 4)))
    b.ret_void()


def quantize(code: Code, at: Processor, x: str, stored: str, bytes_result: int, scales_result: int) -> None:
    """Rows of x to bytes and their scales: `quantized.quantize` to the last bit as XLA compiles it, which multiplies by reciprocals."""
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

    def written(place: Any, lanes: int, inverse: Any, target: Any) -> None:
        values = b.fmul(as_floats(code, at, place, x, lanes), code.splat(inverse, lanes))
        values = code.call(f"llvm.rint.v{lanes}f32", values.type, values)
        whole = b.trunc(b.fptosi(values, vector(I32, lanes)), vector(I8, lanes))
        code.store(b.xor(whole, constant(whole.type, -128)) if stored == "uint8" else whole, target)

    first, end = (b.sdiv(code.mul(rows, n), parts) for n in (part, code.add(part, 1)))
    with code.loop(first, end, 1) as each:
        row, target = code.at(source, code.mul(code.mul(each.index, size), SIZES[x])), code.at(into, code.mul(each.index, size))
        with code.loop(0, whole, at.lanes, [constant(vector(F32, at.lanes), SMALLEST)]) as numbers:
            numbers.next([largest(code.at(row, code.mul(numbers.index, SIZES[x])), at.lanes, numbers.values[0])])
        most = code.call(f"llvm.vector.reduce.fmaximum.v{at.lanes}f32", F32, numbers.results[0])
        with code.loop(whole, size, 1, [code.splat(most, 1)]) as tail:
            tail.next([largest(code.at(row, code.mul(tail.index, SIZES[x])), 1, tail.values[0])])
        scale = b.fmul(b.extract_element(tail.results[0], I32(0)), F32(RECIPROCAL))
        inverse = b.fdiv(F32(1.0), scale)
        code.store(scale, code.at(scales, code.mul(each.index, 4)), 4)
        with code.loop(0, whole, at.lanes) as numbers:
            written(code.at(row, code.mul(numbers.index, SIZES[x])), at.lanes, inverse, code.at(target, numbers.index))
        with code.loop(whole, size, 1) as tail:
            written(code.at(row, code.mul(tail.index, SIZES[x])), 1, inverse, code.at(target, tail.index))
    b.ret_void()
