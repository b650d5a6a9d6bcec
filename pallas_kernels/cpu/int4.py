"""Products with four-bit weights: x [rows, in] @ weight [out, in].T, for any number of rows.

Weights are unpacked to the dtype in which they are multiplied: bfloat16 if x is bfloat16 and the processor
has bfloat16 pair instructions, otherwise float32. For a single row, they are unpacked in registers. For
several rows, a panel of outputs is unpacked once and stays in the processor's cache while all rows are
multiplied by it. Both ways give the same weights and add in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import AHEAD, LINE, Out, padded, store_rows, totals
from pallas_kernels.cpu.emit import BF16, F32, I8, I16, I32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, Format, Processor, plain_format, processor
from pallas_kernels.cpu.multiply import CONVERTED_FEW, NONE, PANEL, SCRATCH, dispatch, strips
from pallas_kernels.int4 import E2M1, TILE

LANES, STEPS = 16, 4  # per tile: words, and steps of 32 inputs
SCALES_AHEAD = 512  # prefetch distance for scales and offsets in bytes
# the number of each four-bit code
TABLES = {"int4": [n - 16 * (n > 7) for n in range(16)], "e2m1": [*E2M1, *(-n for n in E2M1)]}
# x; weight, bytes per row; scales, offsets, bytes per row of each; number of inputs; out, bytes per number
ARGUMENTS = (PTR, PTR, I64, PTR, PTR, I64, I64, PTR, I64)


@dataclass(frozen=True)
class How:
    """Parameters of the generated code.

    Attributes:
        pairs: weights are unpacked to bfloat16.
        format: how unpacked weights are multiplied.
        group: inputs per scale.
        offset: weights have offsets.
        kind: `Int4.kind`.
        alone: outputs by which a single row is multiplied at once. With few, each sum would wait for its
            previous term.
    """

    at: Processor
    pairs: bool
    format: Format
    group: int
    offset: bool
    kind: str

    @property
    def alone(self) -> int:
        return self.at.outs * (2 if self.at.lanes == LANES else 1)


def int4_module(target: native.Target, x: str, group: int, offset: bool, kind: str = "int4") -> str:
    """The module of a function `multiply` with arguments x, values, scale and, if weights have offsets,
    offset.
    """
    at, code = processor(target), Code()
    pairs = at.pairs and at.lanes == LANES and x == "bfloat16"
    how = How(at, pairs, plain_format(at, x, "bfloat16" if pairs else "float32"), group, offset, kind)
    _single(code, "block", how, how.alone)
    _single(code, "single", how, 1)
    _unpack(code, how)
    dispatch(code, "unpacked", at, how.format, Out(), (NONE,))
    _multiply(code, how)
    return str(code.module)


def _multiply(code: Code, how: How) -> None:
    at = how.at
    frame, part, parts = code.function("multiply", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (x, x_shape), (weight, shape), (scale, scale_shape) = (code.argument(frame, index) for index in range(3))
    offset = code.argument(frame, 3)[0] if how.offset else scale
    result, _ = code.result(frame, 0)
    rows, size, count = code.word(x_shape, 0), code.word(x_shape, 1), code.word(shape, 0)
    x_row, weight_row, scale_row = (
        code.mul(size, SIZES[how.format.x]),
        code.mul(code.word(shape, 1), 4),
        code.mul(code.word(scale_shape, 1), 4),
    )
    out_size = code.result_size(frame, 0)
    result_row = code.mul(count, out_size)

    def share(outs: int) -> tuple[Any, Any, Any]:
        """First and end of this part, in blocks of `outs`, and the start of the last block, which may overlap
        the one before.
        """
        units = b.sdiv(code.add(count, outs - 1), I64(outs))
        first, end = (code.mul(b.sdiv(code.mul(units, n), parts), outs) for n in (part, code.add(part, 1)))
        last = b.select(b.icmp_signed(">", count, I64(outs)), b.sub(count, I64(outs)), I64(0))
        return first, code.least(count, end), last

    first, end, last = share(at.outs)
    unpacked_row = code.mul(code.word(shape, 1), 8 * SIZES[how.format.weight])
    fit = code.least(b.and_(b.sdiv(I64(SCRATCH), unpacked_row), I64(-at.outs)), PANEL)
    many = b.select(b.icmp_signed(">", fit, I64(at.outs)), fit, I64(at.outs))
    panel = b.select(b.icmp_signed(">", rows, I64(CONVERTED_FEW)), many, I64(at.outs))

    def of_weight(out: Any) -> list[Any]:
        by_scale = code.mul(out, scale_row)
        place = code.at(weight, code.mul(out, weight_row))
        return [place, weight_row, code.at(scale, by_scale), code.at(offset, by_scale), scale_row, size]

    def one_row(name: str, row: Any, out: Any) -> None:
        into = code.at(result, code.add(code.mul(row, result_row), code.mul(out, out_size)))
        code.call(name, VOID, code.at(x, code.mul(row, x_row)), *of_weight(out), into, out_size)

    one = b.icmp_signed("==", rows, I64(1))
    # a weight with fewer outputs than a block
    with b.if_then(b.icmp_signed("<", count, b.select(one, I64(how.alone), I64(at.outs)))):
        with code.loop(first, end, 1) as outs, code.loop(0, rows, 1) as each:
            one_row("single", each.index, outs.index)
        b.ret_void()
    with b.if_then(one):
        begin, until, final = share(how.alone)
        with code.loop(begin, until, how.alone) as outs:
            # overlapping blocks write the same results
            one_row("block", I64(0), code.least(outs.index, final))
        b.ret_void()
    scratch = code.buffer(I8, code.mul(unpacked_row, panel))
    with code.loop(first, end, panel) as panels:
        over = code.least(code.add(panels.index, panel), end)
        begin = code.least(panels.index, last)
        code.call("unpack", VOID, *of_weight(begin), b.sub(over, begin), scratch, unpacked_row)
        with strips(code, at, rows) as (row, height), code.loop(begin, over, at.outs) as outs:
            out = code.least(outs.index, b.sub(over, I64(at.outs)))
            args = [
                code.at(x, code.mul(row, x_row)),
                x_row,
                code.at(scratch, code.mul(b.sub(out, begin), unpacked_row)),
                unpacked_row,
                size,
                code.at(result, code.add(code.mul(row, result_row), code.mul(out, out_size))),
                result_row,
                *[scratch] * 3,  # no scales of rows, sums of rows, scales of outputs
                out_size,
                height,
                I64(at.outs),
                I64(NONE),
            ]
            code.call("unpacked", VOID, *args)
    b.ret_void()


def _single(code: Code, name: str, how: How, outs: int) -> None:
    """Writes the function `name` with ARGUMENTS, which multiplies one row by `outs` outputs and prefetches
    weights AHEAD bytes.
    """
    x, weight, weight_row, scale, offset, scale_row, size, result, out_size = code.function(name, ARGUMENTS)
    places = [
        [
            code.at(base, code.mul(row, n))
            for base, row in _arrays(weight, weight_row, scale, offset, scale_row)
        ]
        for n in range(outs)
    ]
    form, x_size = how.format, SIZES[how.format.x]
    for _, *scales in places:
        for place in scales[: 1 + how.offset]:
            code.fetch(code.at(place, SCALES_AHEAD))

    def multiplied(sums: Sequence[Any], x: Any, tile: Any) -> list[Any]:
        out = list(sums)
        for o, place in enumerate(places):
            for n, weights in enumerate(_weights(code, how, place, tile)):
                out[o] = form.dot(
                    code, out[o], form.load_x(code, code.at(x, n * form.step * x_size)), weights
                )
        return out

    zero = constant(form.sums, 0.0)
    tiles = code.b.sdiv(size, I64(TILE))
    with code.loop(0, tiles, 1, [zero] * outs) as whole:
        whole.next(multiplied(whole.values, code.at(x, code.mul(whole.index, TILE * x_size)), whole.index))
    rest = code.b.sub(size, code.mul(tiles, TILE))
    # a partial tile
    with code.loop(0, code.b.zext(code.b.icmp_signed("!=", rest, I64(0)), I64), 1, whole.results) as tail:
        left = padded(code, code.at(x, code.mul(tiles, TILE * x_size)), code.mul(rest, x_size), TILE * x_size)
        tail.next(multiplied(tail.values, left, tiles))
    store_rows(code, totals(code, tail.results), 0, 1, outs, result, I64(0), out_size)
    code.b.ret_void()


def _unpack(code: Code, how: How) -> None:
    """Writes the function `unpack`, which unpacks the weights of consecutive outputs, each padded to whole
    tiles.
    """
    kinds = (*ARGUMENTS[1:7], I64, PTR, I64)
    weight, weight_row, scale, offset, scale_row, size, count, into, into_row = code.function("unpack", kinds)
    tiles = code.b.sdiv(code.add(size, TILE - 1), I64(TILE))
    item = SIZES[how.format.weight]
    with code.loop(0, count, 1) as each:
        places = [
            code.at(base, code.mul(each.index, row))
            for base, row in _arrays(weight, weight_row, scale, offset, scale_row)
        ]
        target = code.at(into, code.mul(each.index, into_row))
        with code.loop(0, tiles, 1) as tile:
            for n, weights in enumerate(_weights(code, how, places, tile.index)):
                code.store(
                    weights,
                    code.at(target, code.add(code.mul(tile.index, TILE * item), n * how.format.step * item)),
                )
    code.b.ret_void()


def _arrays(weight: Any, weight_row: Any, scale: Any, offset: Any, scale_row: Any) -> list[tuple[Any, Any]]:
    return [(weight, weight_row), (scale, scale_row), (offset, scale_row)]


def _weights(code: Code, how: How, places: Sequence[Any], tile: Any) -> list[Any]:
    """Loads the weights of one output's tile, in order, for `how.format`. Prefetches words AHEAD bytes.

    Args:
        places: addresses of the output's words, scales and offsets.
    """
    words, scales, offsets = places
    place, each = code.at(words, code.mul(tile, 4 * LANES)), how.group // 32
    by_scale = code.mul(tile, 4 * (TILE // how.group))
    for line in range(0, 4 * LANES, LINE):
        code.fetch(code.at(place, AHEAD + line))
    word, out = code.load(place, vector(I32, LANES)), []
    for group in range(STEPS // each):
        scale, offset = (_splat(code, code.at(base, by_scale), group) for base in (scales, offsets))
        own = range(group * each, (group + 1) * each)
        out += (_pairs if how.pairs else _floats)(code, how, word, own, scale, offset if how.offset else None)
    return out


def _pairs(code: Code, how: How, word: Any, steps: Sequence[int], scale: Any, offset: Any) -> list[Any]:
    """bfloat16 weights of a group, looked up in a table of the group's sixteen possible weights."""
    b = code.b
    weights = _scaled(code, ir.Constant(scale.type, [float(n) for n in TABLES[how.kind]]), scale, offset)
    narrow = code.call("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BF16, LANES), weights)
    table = b.bitcast(narrow, vector(I16, LANES))
    # two copies: the fifth index bit belongs to another number
    table = code.shuffle(table, table, [*range(LANES)] * 2)
    out = []
    for step in steps:
        bits = b.lshr(word, constant(word.type, 4 * step)) if step else word
        known = code.call("llvm.x86.avx512.permvar.hi.512", table.type, table, b.bitcast(bits, table.type))
        out.append(b.bitcast(known, vector(BF16, 2 * LANES)))
    return out


def _floats(code: Code, how: How, word: Any, steps: Sequence[int], scale: Any, offset: Any) -> list[Any]:
    """float32 weights of a group."""
    b, out = code.b, []
    for step in steps:
        halves = []  # the even inputs and the odd ones
        for half in range(2):
            up = 28 - 4 * step - 16 * half
            bits = b.ashr(b.shl(word, constant(word.type, up)) if up else word, constant(word.type, 28))
            numbers = b.sitofp(_of_e2m1(code, bits) if how.kind == "e2m1" else bits, vector(F32, LANES))
            halves.append(_scaled(code, numbers, scale, offset))
        lanes = [n // 2 + LANES * (n % 2) for n in range(2 * LANES)]
        even, odd = halves
        out += [
            code.shuffle(even, odd, lanes[start : start + how.format.step])
            for start in range(0, 2 * LANES, how.format.step)
        ]
    return out


def _scaled(code: Code, numbers: Any, scale: Any, offset: Any) -> Any:
    if offset is None:
        return code.b.fmul(numbers, scale)
    return code.call(f"llvm.fmuladd.v{LANES}f32", scale.type, numbers, scale, offset)


def _of_e2m1(code: Code, bits: Any) -> Any:
    """Numbers for e2m1 codes with extended sign bits."""
    b = code.b

    def at_least_zero(x: Any) -> Any:
        return b.select(b.icmp_signed(">", x, constant(x.type, 0)), x, constant(x.type, 0))

    size = b.and_(bits, constant(bits.type, 7))
    over_4, over_6 = (at_least_zero(b.sub(size, constant(bits.type, n))) for n in (4, 6))
    magnitude = b.add(b.add(size, over_4), b.add(over_6, over_6))
    return b.select(b.icmp_signed("<", bits, constant(bits.type, 0)), b.neg(magnitude), magnitude)


def _splat(code: Code, places: Any, index: int) -> Any:
    return code.splat(code.load(code.at(places, 4 * index), F32, 4), LANES)
