"""Products x [rows, in] @ weight [out, in].T as functions of (frame, part, parts), block by block, for any
number of rows.

For a few rows, each block of outputs is multiplied by all rows before the next, so that weights are read from
memory once, in storage order, and are prefetched. For many rows, a panel of outputs stays in the L2 cache
while it is multiplied by all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import product

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import (
    AHEAD,
    ALL,
    CHUNK,
    CONVERT,
    CONVERTED,
    KINDS,
    NONE,
    SPREAD,
    Operands,
    block,
    padded,
)
from pallas_kernels.llvm.code import Code, share, write_parts
from pallas_kernels.llvm.formats import (
    SIZES,
    Format,
    Processor,
    as_floats,
    as_pairs,
    byte_format,
    plain_format,
    processor,
)
from pallas_kernels.llvm.types import F32, I8, I32, I64, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.hadamard import ALONE, transform_row

FEW = 64  # maximum rows for which reading weights dominates
PANEL = 64  # maximum outputs
ROWS = 96  # maximum rows whose sums are kept, if their inputs are multiplied in chunks
STRIP = 8  # larger than any strip
MAXIMA = 4  # vectors of maxima of a row; in a single one, each waits for the one before
SMALLEST, RECIPROCAL = 1e-30, 1 / 127  # as in `quantized`


def product_module(target: native.Target, x: str, weight: str) -> str:
    """The function `multiply` of x, weight and, for eight bits, the weight's scale [out]."""
    at, code = processor(target).for_floats(), Code()
    fmt = plain_format(at, x, weight)
    computed = "bfloat16" if at.pairs and x == "bfloat16" and weight != "float32" else "float32"
    _multiply(code, at, fmt, None if computed == weight else computed)
    return code.text()


def bytes_module(target: native.Target, x: str, hadamard: int = 1) -> str:
    """The functions `quantize`, `quantize_parts` and `multiply` of x, int8 weight and its scale.

    Results: out, bytes of x, their scales and their sums [rows]; with a hadamard block above 1, also x
    transformed, float32.
    """
    at, code = processor(target), Code()
    fmt = byte_format(at)
    quantize(code, at, x, 1, 2, sums=(fmt.offset, 3) if fmt.offset else None, transformed=(hadamard, 4))
    _multiply(code, at, fmt, None)
    return code.text()


def _multiply(code: Code, at: Processor, fmt: Format, converted: str | None) -> None:
    """Args: converted: the dtype to which weights are converted once, if they are multiplied by more rows
    than a block has.
    """
    scaled = SIZES[fmt.weight] == 1
    dispatch(code, "strip", at, fmt, scaled, (ALL, CONVERT) if converted else (NONE, ALL, SPREAD))
    if converted:
        inner = replace(plain_format(at, fmt.x, converted), factor=fmt.factor)
        dispatch(code, "converted", at, inner, scaled, (NONE, SPREAD))
        _convert(code, at, fmt.weight, converted)
    frame, part, parts = code.kernel("multiply")
    (x, _), (weight, shape) = code.argument(frame, 0), code.argument(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, (count, size) = code.word(result_shape, 0), (code.word(shape, index) for index in (0, 1))
    out_scale = code.argument(frame, 2)[0] if scaled else x
    row_scale = row_sum = x
    if fmt.x == "int8":
        x, row_scale, row_sum = (code.result(frame, index)[0] for index in (1, 2, 3))
    x_row, weight_row = (size * SIZES[kind] for kind in (fmt.x, fmt.weight))
    out_size = code.result_size(frame, 0)
    result_row = count * out_size
    first, end, last = blocks_of(count, at.outs, part, parts)
    many = rows > at.rows
    panel = (rows > FEW).choose(code.whole(PANEL), at.outs)
    item, vector_bytes = SIZES[converted or fmt.weight], 4 * at.lanes
    chunk = many.choose(code.whole(CHUNK // item), size)
    divided = size > chunk
    # Of few rows, each strip prefetches its share of the next outputs' weights, so that memory is busy.
    numbers = at.outs * SIZES[fmt.weight]  # bytes for each input
    share_of_row = 256 * numbers // rows
    fetch = (rows > FEW).choose(code.whole(NONE), SPREAD)
    group = divided.choose(code.whole(ROWS), rows)
    partial = code.memory(divided.choose(group.least(rows) * panel * vector_bytes, 0))
    scratch = code.memory(many.choose(panel * CONVERTED, 0)) if converted else weight
    # The first strip of few rows converts weights while it multiplies.
    at_once = many & (rows <= FEW) & (count >= at.outs)

    def operands_of(row: Value, o: Value, start: Value, taken: Value) -> Operands:
        return Operands(
            x=x + (row * x_row + start * SIZES[fmt.x]),
            x_row=x_row,
            weight=weight + (o * weight_row + start * SIZES[fmt.weight]),
            weight_row=weight_row,
            size=taken,
            partial=partial,
            before=start,
            after=size - start - taken,
            result=result + (row * result_row + o * out_size),
            result_row=result_row,
            row_scale=row_scale + row * 4,
            row_sum=row_sum + row * 4,
            out_scale=out_scale + o * 4,
            out_size=out_size,
            ahead=weight,
            rate=size,
            converted=scratch,
        )

    with code.when(rows.equals(1) & (count >= at.outs)):
        with code.loop(first, end, at.outs) as o:
            code.call(f"strip_1_{ALL}", VOID, *operands_of(rows - 1, o.least(last), rows - 1, size))
        code.ret()

    def multiply(start: Value, row_group: Value, taken: Value, begin: Value, over: Value) -> None:
        """Multiplies a group of rows by a panel, for the chunk of inputs from start on."""
        if converted:
            with code.when(many & at_once.equals(0)):
                source = weight + (begin * weight_row + start * SIZES[fmt.weight])
                code.call(
                    "convert", VOID, source, weight_row, taken, over - begin, scratch, code.whole(CONVERTED)
                )
        group_rows = group.least(rows - row_group)
        with strips(code, at, group_rows) as (strip, height), code.loop(begin, over, at.outs) as outs:
            row = row_group + strip
            o = outs.least(begin.equals(last).choose(last, over - at.outs))
            source = weight + ((o + at.outs) * weight_row + start * numbers)
            operands = operands_of(row, o, start, taken)._replace(
                partial=partial + (strip * panel + (outs - begin) * height) * vector_bytes,
                ahead=source + (strip * taken * share_of_row >> 8),
                rate=height * share_of_row,
            )
            left = (over - o).least(at.outs)
            if converted:
                by_scratch = many & (at_once.equals(0) | (strip > 0))
                of_scratch = operands._replace(
                    weight=scratch + (o - begin) * CONVERTED, weight_row=code.whole(CONVERTED)
                )
                with code.if_else(by_scratch) as (yes, no):
                    with yes:
                        code.call("converted", VOID, *of_scratch, height, left, fetch)
                    with no:
                        code.call(
                            "strip", VOID, *operands, height, left, many.choose(code.whole(CONVERT), ALL)
                        )
            else:
                code.call("strip", VOID, *operands, height, left, many.choose(fetch, ALL))

    with code.loop(first, end, panel) as outs, code.loop(0, rows, group) as row:
        over = (outs + panel).least(end)
        begin = outs.least(last)  # the last blocks may overlap: both compute equal results
        with code.loop(0, size, chunk) as start:
            multiply(start, row, (size - start).least(chunk), begin, over)


def blocks_of(count: Value, outs: int, part: Value, parts: Value) -> tuple[Value, Value, Value]:
    """First and end of a part's outputs, in blocks of `outs`, and the start of the last block, which may
    overlap the one before.
    """
    first, end = (unit * outs for unit in share((count + (outs - 1)) // outs, part, parts))
    return first, count.least(end), (count - outs).most(0)


@contextmanager
def strips(code: Code, at: Processor, rows: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over strips of rows: the first row, and the number of rows, one of `heights`."""
    first = code.variable(code.whole(0))
    with code.repeat(lambda: first.get() < rows):
        row = first.get()
        left, height = rows - row, code.whole(1)
        for count in heights(at)[1:]:
            height = (left >= count).choose(count, height)
        if at.rows == 3:  # two first, since blocks of two have registers for converting weights
            height = (left % 3).equals(0).choose(height, height.least(2))
        else:
            height = left.equals(8).choose(min(4, at.rows), height)  # rather than six and two
        yield row, height
        first.set(row + height)


def heights(at: Processor) -> list[int]:
    return [1, 2, 3] if at.rows == 3 else [count for count in (1, 2, 4, 6) if count <= at.rows]


def dispatch(code: Code, name: str, at: Processor, fmt: Format, scaled: bool, fetches: Sequence[int]) -> None:
    """A function of Operands, the number of rows (one of `heights`), the number of outputs (at most a
    block's), and the prefetch mode.
    """
    made = {}
    for mode, height in product(fetches, heights(at)):
        made[height + mode * STRIP] = f"{name}_{height}_{mode}"
        block(code, f"{name}_{height}_{mode}", fmt, height, at.outs, scaled, fetch=mode)
    block(code, f"{name}_single", fmt, 1, 1, scaled)
    *operands, rows, outs, fetch = code.function(name, (*KINDS, I64, I64, I64), inline=True)
    arguments = Operands(*operands)
    with code.when(outs < at.outs):  # a weight with fewer outputs
        with code.loop(0, rows) as row, code.loop(0, outs) as o:
            shifted = arguments._replace(
                x=arguments.x + row * arguments.x_row,
                weight=arguments.weight + o * arguments.weight_row,
                result=arguments.result + (row * arguments.result_row + o * arguments.out_size),
                partial=arguments.partial + (row * outs + o) * (4 * at.lanes),
                row_scale=arguments.row_scale + row * 4,
                row_sum=arguments.row_sum + row * 4,
                out_scale=arguments.out_scale + o * 4,
            )
            code.call(f"{name}_single", VOID, *shifted)
        code.ret()
    with code.cases(rows + fetch * STRIP) as case:
        for number, block_name in made.items():
            with case(number):
                code.call(block_name, VOID, *arguments)


def _convert(code: Code, at: Processor, stored: str, converted: str) -> None:
    """Writes the function `convert`, which converts rows of weights to another dtype, each padded to
    whole vectors.
    """
    weight, row, size, count, into, into_row = code.function("convert", (PTR, I64, I64, I64, PTR, I64))
    step, item, new_item = 2 * at.lanes, SIZES[stored], SIZES[converted]

    def convert(source: Value, target: Value) -> None:
        halves = [as_floats(code, at, source + half * at.lanes * item, stored, at.lanes) for half in (0, 1)]
        # only eight-bit numbers are converted to bfloat16, and it represents them exactly
        if converted == "bfloat16":
            code.store(as_pairs(*halves), target)
            return
        for half, values in enumerate(halves):
            code.store(values, target + half * at.lanes * new_item)

    whole = size.rounded_down(step)
    rest = size - whole
    with code.loop(0, count) as each:
        source, target = weight + each * row, into + each * into_row
        with code.loop(0, whole, step) as n:
            place = source + n * item
            code.prefetch(place + AHEAD)
            convert(place, target + n * new_item)
        with code.when(rest > 0):
            convert(padded(code, source + whole * item, rest * item, step * item), target + whole * new_item)


def quantize(
    code: Code,
    at: Processor,
    x: str,
    bytes_result: int,
    scales_result: int,
    sums: tuple[int, int] | None = None,
    transformed: tuple[int, int] = (1, 0),
    then: Callable[[Value, Value, Value], None] | None = None,
) -> None:
    """Quantizes rows of x to bytes: bit-identical to `quantized.quantize` as compiled by XLA, which
    multiplies by reciprocals.

    Writes the functions `quantize`, and `quantize_parts`, which returns the number of parts.

    Args:
        sums: (factor, result): also stores each row's sum of bytes, times the factor.
        transformed: (block, result): transforms rows first, if block is more than 1.
        then: writes what follows each row, given the frame, the row's index and its size.
    """
    hadamard, buffer = transformed
    stored, x = x, "float32" if hadamard > 1 else x
    if hadamard > 1:
        transform_row(code, at, stored, hadamard)
    write_parts(code, "quantize_parts", 2, ALONE)
    frame, part, parts = code.kernel("quantize")
    source, shape = code.argument(frame, 0)
    into, scales = code.result(frame, bytes_result)[0], code.result(frame, scales_result)[0]
    rows, size, item = code.word(shape, 0), code.word(shape, 1), SIZES[x]
    whole = size.rounded_down(at.lanes)

    def larger(known: Value, place: Value, lanes: int) -> Value:
        return code.intrinsic("maximum", code.intrinsic("fabs", as_floats(code, at, place, x, lanes)), known)

    def write(place: Value, lanes: int, inverse: Value, target: Value) -> Value:
        scaled = as_floats(code, at, place, x, lanes) * inverse.splat(lanes)
        values = code.intrinsic("rint", scaled).to(vector(I32, lanes))
        code.store(values.to(vector(I8, lanes)), target)
        return values

    with code.loop(*share(rows, part, parts)) as each:
        start = each * size
        row, target = source + start * SIZES[stored], into + start
        if hadamard > 1:
            spread = code.result(frame, buffer)[0] + start * 4
            code.call("transform_row", VOID, row, spread, size)
            row = spread
        lanes = [code.variable(code.constant(vector(F32, at.lanes), SMALLEST)) for _ in range(MAXIMA)]
        several = whole.rounded_down(MAXIMA * at.lanes)
        with code.loop(0, several, MAXIMA * at.lanes) as first:
            for index, maxima in enumerate(lanes):
                place = row + (first + index * at.lanes) * item
                maxima.set(larger(maxima.get(), place, at.lanes))
        with code.loop(several, whole, at.lanes) as n:
            lanes[0].set(larger(lanes[0].get(), row + n * item, at.lanes))
        largest = reduce(partial(code.intrinsic, "maximum"), [maxima.get() for maxima in lanes])
        maximum = code.variable(code.reduced("fmaximum", largest).splat(1))
        with code.loop(whole, size) as n:
            maximum.set(larger(maximum.get(), row + n * item, 1))
        scale = maximum.get().lane(0) * RECIPROCAL
        inverse = 1.0 / scale
        code.store(scale, scales + each * 4, 4)
        added = code.variable(code.constant(vector(I32, at.lanes), 0))
        with code.loop(0, whole, at.lanes) as n:
            added.set(added.get() + write(row + n * item, at.lanes, inverse, target + n))
        total = code.variable(code.reduced("add", added.get()))
        with code.loop(whole, size) as n:
            total.set(total.get() + write(row + n * item, 1, inverse, target + n).lane(0))
        if sums is not None:
            factor, index = sums
            code.store(total.get() * factor, code.result(frame, index)[0] + each * 4, 4)
        if then is not None:
            then(frame, each, size)
