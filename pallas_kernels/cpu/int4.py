"""Products with four-bit weights, which are unpacked in registers: x [rows, in] @ weight [out, in].T, for any number of rows.

Where the processor multiplies pairs of bfloat16, the numbers of a group are multiplied as they are, exactly, and each group's sum by its
scale; offsets are multiplied by sums of x, which are taken before. Elsewhere numbers become float32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import AHEAD, LINE, padded, store_rows, totals
from pallas_kernels.cpu.emit import BF16, F32, I16, I32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, Processor, processor
from pallas_kernels.cpu.multiply import FEW, PANEL, heights, strips
from pallas_kernels.int4 import E2M1, SCALES, TILE

LANES, STEPS = 16, 4  # words of a tile, and steps of 32 inputs
FLOAT_ROWS = 2  # of a block, where numbers become float32
TABLES = {"int4": [n - 16 * (n > 7) for n in range(16)], "e2m1": [*E2M1, *(-n for n in E2M1)]}  # numbers of four bits
# x, bytes of a row; weight, bytes of a row; scales, offsets, sums of x, bytes of a row of each; inputs; out, bytes of a row, of a number
ARGUMENTS = (PTR, I64, PTR, I64, PTR, PTR, PTR, I64, I64, PTR, I64, I64)


@dataclass(frozen=True)
class How:
    """Attributes:
    pairs: as the processor multiplies bfloat16.
    group: inputs that share a scale.
    offset: there are offsets.
    kind: Int4's.
    """

    at: Processor
    x: str
    group: int
    offset: bool
    kind: str = "int4"

    @property
    def pairs(self) -> bool:
        return self.at.pairs and self.at.lanes == LANES and self.x == "bfloat16"

    @property
    def sums(self) -> bool:
        """Sums of x are needed."""
        return self.pairs and self.offset


def needs_sums(target: native.Target, x: str, offset: bool) -> bool:
    return How(processor(target), x, TILE, offset).sums


def int4_module(target: native.Target, x: str, group: int, offset: bool, kind: str = "int4") -> str:
    """The function `multiply` of x, values, scale and, if there is, offset; before it `sums`, where `needs_sums`, whose result is the
    second: float32 [rows, groups]."""
    at, code = processor(target), Code()
    how = How(at, x, group, offset, kind)
    if not how.pairs:
        how = replace(how, at=replace(at, rows=min(at.rows, FLOAT_ROWS)))
    if how.sums:
        _sums(code, how)
    _multiply(code, how)
    return str(code.module)


def _multiply(code: Code, how: How) -> None:
    at = how.at
    for rows in heights(at):
        for fetched in (False, True):
            _block(code, f"block_{rows}_{int(fetched)}", how, rows, at.outs, fetched)
    _block(code, "single", how, 1, 1, False)
    frame, part, parts = code.function("multiply", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (x, x_shape), (weight, shape), (scale, scale_shape) = (code.argument(frame, index) for index in range(3))
    offset = code.argument(frame, 3)[0] if how.offset else scale
    (result, _), sums = code.result(frame, 0), code.result(frame, 1)[0] if how.sums else x
    rows, size, count = code.word(x_shape, 0), code.word(x_shape, 1), code.word(shape, 0)
    x_row, weight_row, scale_row = code.mul(size, SIZES[how.x]), code.mul(code.word(shape, 1), 4), code.mul(code.word(scale_shape, 1), 4)
    out_size = code.result_size(frame, 0)
    result_row = code.mul(count, out_size)
    units = b.sdiv(code.add(count, at.outs - 1), I64(at.outs))
    first = code.mul(b.sdiv(code.mul(units, part), parts), at.outs)
    end = code.least(count, code.mul(b.sdiv(code.mul(units, code.add(part, 1)), parts), at.outs))
    last = b.select(b.icmp_signed(">", count, I64(at.outs)), b.sub(count, I64(at.outs)), I64(0))  # where the last block begins
    panel = b.select(b.icmp_signed(">", rows, I64(FEW)), I64(PANEL), I64(at.outs))

    def passed(row: Any, out: Any) -> list[Any]:
        by_scale = code.mul(out, scale_row)
        return [
            code.at(x, code.mul(row, x_row)),
            x_row,
            code.at(weight, code.mul(out, weight_row)),
            weight_row,
            code.at(scale, by_scale),
            code.at(offset, by_scale),
            code.at(sums, code.mul(row, scale_row)) if how.sums else sums,
            scale_row,
            size,
            code.at(result, code.add(code.mul(row, result_row), code.mul(out, out_size))),
            result_row,
            out_size,
        ]

    with b.if_then(b.icmp_signed("<", count, I64(at.outs))):  # of a weight that has no more
        with code.loop(first, end, 1) as outs, code.loop(0, rows, 1) as each:
            code.call("single", VOID, *passed(each.index, outs.index))
        b.ret_void()
    with code.loop(first, end, panel) as panels:
        over = code.least(code.add(panels.index, panel), end)
        with strips(code, at, rows) as (row, height), code.loop(panels.index, over, at.outs) as outs:
            args = passed(row, code.least(outs.index, last))  # the last blocks may overlap: what is computed twice is the same
            done = b.append_basic_block("done")
            fetched = b.zext(b.icmp_signed("==", row, I64(0)), I64)
            switch = b.switch(code.add(code.mul(height, 2), fetched), done)
            for rows_here in heights(at):
                for fetches in (0, 1):
                    case = b.append_basic_block()
                    switch.add_case(I64(2 * rows_here + fetches), case)
                    b.position_at_end(case)
                    code.call(f"block_{rows_here}_{fetches}", VOID, *args)
                    b.branch(done)
            b.position_at_end(done)
    b.ret_void()


def _block(code: Code, name: str, how: How, rows: int, outs: int, fetched: bool) -> None:
    """Write the function of this name, which takes ARGUMENTS, for so many rows and outputs. fetched: weights are asked for AHEAD."""
    x, x_row, weight, weight_row, scale, offset, sums, scale_row, size, result, result_row, out_size = code.function(name, ARGUMENTS)
    xs = [code.at(x, code.mul(x_row, row)) for row in range(rows)]
    weights, scales, offsets = (
        [code.at(base, code.mul(step, n)) for n in range(outs)]
        for base, step in ((weight, weight_row), (scale, scale_row), (offset, scale_row))
    )
    tile_bytes, scale_bytes = SIZES[how.x] * TILE, 4 * (TILE // how.group)

    def multiplied(found: Sequence[Any], xs: Sequence[Any], index: Any) -> list[Any]:
        here = [code.at(place, code.mul(index, 4 * LANES)) for place in weights]
        by_scale = code.mul(index, scale_bytes)
        own = [code.at(place, by_scale) for place in scales], [code.at(place, by_scale) for place in offsets]
        if fetched:
            for place in here:
                for line in range(0, 4 * LANES, LINE):
                    code.fetch(code.at(place, AHEAD + line))
        return (_pairs if how.pairs else _floats)(code, how, found, xs, here, *own)

    zero = constant(vector(F32, LANES), 0.0)
    tiles = code.b.sdiv(size, I64(TILE))
    with code.loop(0, tiles, 1, [zero] * (rows * outs)) as whole:
        step = code.mul(whole.index, tile_bytes)
        whole.next(multiplied(whole.values, [code.at(place, step) for place in xs], whole.index))
    rest = code.b.sub(size, code.mul(tiles, TILE))
    some = code.b.zext(code.b.icmp_signed("!=", rest, I64(0)), I64)
    with code.loop(0, some, 1, whole.results) as tail:  # what fills no tile
        at = code.mul(tiles, tile_bytes)
        tail.next(multiplied(tail.values, [padded(code, code.at(p, at), code.mul(rest, SIZES[how.x]), tile_bytes) for p in xs], tiles))
    found = tail.results
    if how.sums:
        found = _with_offsets(code, found, offsets, [code.at(sums, code.mul(scale_row, row)) for row in range(rows)], scale_row)
    at_once = max(1, LANES // outs)
    for start in range(0, rows, at_once):
        end = min(rows, start + at_once)
        store_rows(code, totals(code, found[start * outs : end * outs]), start, end, outs, result, result_row, out_size)
    code.b.ret_void()


def _pairs(
    code: Code, how: How, found: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any], scales: Sequence[Any], offsets: Sequence[Any]
) -> list[Any]:
    """A tile's products by pairs of bfloat16: numbers are looked up in a table, and sums of groups are scaled."""
    b, out, each = code.b, list(found), how.group // 32
    table = ir.Constant(
        vector(I16, 2 * LANES), [_bfloat16_bits(n) for n in TABLES[how.kind]] * 2
    )  # the fifth bit, of another number, does not count
    for o, place in enumerate(weights):
        word = code.load(place, vector(I32, LANES))
        numbers = []
        for step in range(STEPS):
            bits = b.lshr(word, constant(word.type, 4 * step)) if step else word
            known = code.call("llvm.x86.avx512.permvar.hi.512", table.type, table, b.bitcast(bits, table.type))
            numbers.append(b.bitcast(known, vector(BF16, 2 * LANES)))
        for r, x in enumerate(xs):
            for group in range(STEPS // each):
                sums = constant(vector(F32, LANES), 0.0)
                for step in range(group * each, (group + 1) * each):
                    pairs = code.load(code.at(x, 4 * LANES * step), vector(BF16, 2 * LANES))
                    sums = code.call("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, pairs, numbers[step])
                index = r * len(weights) + o
                out[index] = _fma(code, sums, _splat(code, scales[o], group), out[index])
    return out


def _floats(
    code: Code, how: How, found: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any], scales: Sequence[Any], offsets: Sequence[Any]
) -> list[Any]:
    """A tile's products by float32 weights, the even inputs and the odd ones."""
    b, out, each = code.b, list(found), how.group // 32
    words = [code.load(place, vector(I32, LANES)) for place in weights]
    for step in range(STEPS):
        inputs = [_apart(code, how.x, code.at(x, 32 * SIZES[how.x] * step)) for x in xs]
        for o, word in enumerate(words):
            scale, offset = (_splat(code, places[o], step // each) for places in (scales, offsets))
            for half in range(2):
                up = 28 - 4 * step - 16 * half
                bits = b.ashr(b.shl(word, constant(word.type, up)) if up else word, constant(word.type, 28))
                weight = b.sitofp(_of_e2m1(code, bits) if how.kind == "e2m1" else bits, vector(F32, LANES))
                weight = _fma(code, weight, scale, offset) if how.offset else b.fmul(weight, scale)
                for r, halves in enumerate(inputs):
                    index = r * len(weights) + o
                    out[index] = _fma(code, halves[half], weight, out[index])
    return out


def _of_e2m1(code: Code, bits: Any) -> Any:
    """Numbers by their codes, sign bits extended."""
    b = code.b

    def at_least_zero(x: Any) -> Any:
        return b.select(b.icmp_signed(">", x, constant(x.type, 0)), x, constant(x.type, 0))

    size = b.and_(bits, constant(bits.type, 7))
    over_4, over_6 = (at_least_zero(b.sub(size, constant(bits.type, n))) for n in (4, 6))
    magnitude = b.add(b.add(size, over_4), b.add(over_6, over_6))
    return b.select(b.icmp_signed("<", bits, constant(bits.type, 0)), b.neg(magnitude), magnitude)


def _apart(code: Code, x: str, place: Any) -> tuple[Any, Any]:
    """The even and the odd of 32 numbers, as float32."""
    b, floats = code.b, vector(F32, LANES)
    if x == "bfloat16":
        both = code.load(place, vector(I32, LANES))
        return b.bitcast(b.shl(both, constant(both.type, 16)), floats), b.bitcast(b.and_(both, constant(both.type, -(1 << 16))), floats)
    low, high = (code.load(code.at(place, 4 * LANES * half), floats) for half in range(2))
    return code.shuffle(low, high, range(0, 2 * LANES, 2)), code.shuffle(low, high, range(1, 2 * LANES, 2))


def _with_offsets(code: Code, found: Sequence[Any], offsets: Sequence[Any], sums: Sequence[Any], row: Any) -> list[Any]:
    """With each output's offsets times each row's sums, in the first lanes."""
    few = vector(F32, SCALES)
    with code.loop(0, row, 4 * SCALES, [constant(few, 0.0)] * len(found)) as loop:
        right = [code.load(code.at(place, loop.index), few, 4) for place in offsets]
        left = [code.load(code.at(place, loop.index), few, 4) for place in sums]
        values = iter(loop.values)
        loop.next([_fma(code, one, other, next(values)) for one in left for other in right])
    nothing = constant(few, 0.0)
    lanes = [*range(SCALES), *[SCALES] * (LANES - SCALES)]
    return [code.b.fadd(one, code.shuffle(more, nothing, lanes)) for one, more in zip(found, loop.results, strict=True)]


def _sums(code: Code, how: How) -> None:
    """Sums of each row's groups of bfloat16."""
    frame, part, parts = code.function("sums", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (x, shape), (into, into_shape) = code.argument(frame, 0), code.result(frame, 1)
    rows, size, count = code.word(shape, 0), code.word(shape, 1), code.word(into_shape, 1)
    first, end = (b.sdiv(code.mul(rows, n), parts) for n in (part, code.add(part, 1)))
    group_bytes = SIZES[how.x] * how.group

    def total(place: Any) -> Any:
        found = [half for step in range(how.group // 32) for half in _apart(code, how.x, code.at(place, 4 * LANES * step))]
        while len(found) > 1:
            found = [b.fadd(*found[n : n + 2]) for n in range(0, len(found), 2)]
        return b.extract_element(totals(code, found), I32(0))

    with code.loop(first, end, 1) as each:
        source = code.at(x, code.mul(each.index, code.mul(size, SIZES[how.x])))
        target = code.at(into, code.mul(each.index, code.mul(count, 4)))
        whole = b.sdiv(size, I64(how.group))
        with code.loop(0, whole, 1) as group:
            code.store(total(code.at(source, code.mul(group.index, group_bytes))), code.at(target, code.mul(group.index, 4)), 4)
        rest = b.sub(size, code.mul(whole, how.group))
        with code.loop(whole, count, 1) as padding:
            code.store(F32(0.0), code.at(target, code.mul(padding.index, 4)), 4)
        with b.if_then(b.icmp_signed("!=", rest, I64(0))):
            last = padded(code, code.at(source, code.mul(whole, group_bytes)), code.mul(rest, SIZES[how.x]), group_bytes)
            code.store(total(last), code.at(target, code.mul(whole, 4)), 4)
    b.ret_void()


def _splat(code: Code, places: Any, index: int) -> Any:
    return code.splat(code.load(code.at(places, 4 * index), F32, 4), LANES)


def _fma(code: Code, left: Any, right: Any, to: Any) -> Any:
    return code.call(f"llvm.fmuladd.v{to.type.count}f32", to.type, left, right, to)


def _bfloat16_bits(number: int) -> int:
    import numpy as np

    return int(np.float32(number).view(np.int32) >> 16)
