"""A single row times four-bit weights, where a processor does not multiply pairs of bfloat16 fast.

Converting and scaling each weight would take most of the time. So the row is rounded to integers of 16 bits,
with one scale for each tile of 128 inputs. They are multiplied by the codes of weights, and a group's sum,
an exact integer, is multiplied by its scale. What codes are larger by than numbers, and a group's offset, is
multiplied by the sum of the row's integers in the group, as in `int4_bytes.py`. Rounding moves a number by
at most 2^-16 of its tile's maximum; bfloat16 has moved the maximum itself by up to 2^-9.
"""

from __future__ import annotations

from functools import reduce
from operator import add

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import AHEAD, padded, store_rows, totals
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES, Processor, as_floats, dot_shorts, processor
from pallas_kernels.llvm.types import F32, I16, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.int4 import (
    KINDS,
    SCALES_AHEAD,
    STEPS,
    Packed,
    alone,
    of_e2m1,
    packed_of,
    tiles_of,
)
from pallas_kernels.products.cpu.int4_bytes import SIGNS, of_offsets, scale_of
from pallas_kernels.products.cpu.multiply import blocks_of
from pallas_kernels.quantization.int4 import E2M1, SCALES, TILE

STEP = TILE // STEPS  # inputs
LARGEST = 32767.0  # of 16 bits
SMALLEST = 2.0**-100  # maximum of a tile, so that its reciprocal is a number
EXCESS = {"int4": 8, "e2m1": E2M1[-1]}  # of codes over numbers, by kind


def int4_row_module(target: native.Target, x: str, group: int, offset: bool, kind: str = "int4") -> str:
    """The module of a function `multiply` of x [1, in], values, scale and, if there are offsets, offset."""
    at, code = processor(target), Code()
    _round(code, at, x, group)
    outs = alone(at)
    for at_once in (outs, 1):
        _block(code, f"block_{at_once}", at, group, at_once, offset=offset, kind=kind)
    frame, part, parts = code.kernel("multiply")
    (source, shape), (_, values) = (code.argument(frame, index) for index in (0, 1))
    (result, _), out_size = code.result(frame, 0), code.result_size(frame, 0)
    size, count = code.word(shape, 1), code.word(values, 0)
    weight = packed_of(code, frame, offset, size)
    # each thread rounds the row: it is short beside the weights
    tiles = tiles_of(size)
    integers, scales, sums = (code.memory(n) for n in (tiles * (2 * TILE), tiles * 4, weight.scale_row))
    code.call("round", VOID, source, integers, scales, sums, size, weight.scale_row)

    def run(outs: int) -> None:
        begin, end, last = blocks_of(count, outs, part, parts)
        with code.loop(begin, end, outs) as start:
            out = start.least(last)  # overlapping blocks write the same results
            into = result + out * out_size
            code.call(f"block_{outs}", VOID, integers, scales, sums, *weight.at(out), into, out_size)

    with code.if_else(count < outs) as (few, many):
        with few:
            run(1)
        with many:
            run(outs)
    return code.text()


def _round(code: Code, at: Processor, x: str, group: int) -> None:
    """Writes the function `round`: of a row, the addresses of its integers, of a scale for each tile and of
    sums by group, the number of inputs, and bytes of sums.
    """
    source, into, scales, sums, size, sums_size = code.function("round", (PTR, PTR, PTR, PTR, I64, I64))
    item, floats = SIZES[x], vector(F32, STEP)

    def tile(place: Value, index: Value) -> None:
        numbers = [as_floats(code, at, place + step * STEP * item, x, STEP) for step in range(STEPS)]
        largest = code.constant(floats, SMALLEST)
        for some in numbers:
            largest = code.intrinsic("maximum", code.intrinsic("fabs", some), largest)
        maximum = code.reduced("fmaximum", largest)
        scale, inverse = maximum * (1 / LARGEST), (LARGEST / maximum).splat(STEP)
        code.store(scale, scales + index * 4, 4)
        for step, some in enumerate(numbers):
            integers = code.intrinsic("rint", some * inverse).to(vector(I32, STEP))
            code.store(integers.to(vector(I16, STEP)), into + (index * TILE + step * STEP) * 2)
            numbers[step] = integers
        each = max(group // STEP, 1)
        for first in range(0, STEPS, each):
            added = reduce(add, numbers[first : first + each])
            for n, lane in enumerate(range(0, STEP, min(group, STEP))):
                total = code.reduced("add", added.pick(range(lane, lane + min(group, STEP)))).to(F32)
                to = sums + (index * (TILE // group) + (first * STEP // group + n)) * 4
                code.store(total * scale, to, 4)

    whole = size // TILE
    with code.loop(0, whole) as index:
        tile(source + index * (TILE * item), index)
    rest = size - whole * TILE
    with code.when(rest > 0):
        tile(padded(code, source + whole * (TILE * item), rest * item, TILE * item), whole)
    with code.loop(tiles_of(size) * (TILE // group * 4), sums_size, 4) as place:
        code.store(code.constant(F32, 0.0), sums + place, 4)


def _block(code: Code, name: str, at: Processor, group: int, outs: int, *, offset: bool, kind: str) -> None:
    """Writes a function of (integers of x, their scales, their sums, *Packed, result, bytes of its numbers)
    that multiplies by `outs` outputs.
    """
    x, scales, sums, *packed, result, out_size = code.function(name, (PTR, PTR, PTR, *KINDS, PTR, I64))
    weight, floats = Packed(*packed), vector(F32, at.lanes)
    lines = [weight.at(n) for n in range(outs)]
    for each in lines:
        for place in (each.scale, each.offset)[: 1 + offset]:
            code.prefetch(place + SCALES_AHEAD)
    products = [code.variable(code.constant(floats, 0.0)) for _ in lines]
    with code.loop(0, tiles_of(weight.size)) as tile:
        of_tile = code.load(F32, scales + tile * 4, 4).splat(at.lanes)
        for each, total in zip(lines, products, strict=True):
            place = each.words + tile * (4 * LANES)
            code.prefetch(place + AHEAD)
            dots: dict[tuple[int, ...], Value] = {}  # by the groups of a vector's inputs
            for step, (codes, shift) in enumerate(_codes(code, at, code.load(vector(I32), place), kind)):
                of_step: dict[tuple[int, ...], Value] = {}
                for first in range(0, STEP, 2 * at.lanes):
                    inputs = range(step * STEP + first, step * STEP + first + 2 * at.lanes)
                    integers = code.load(vector(I16, 2 * at.lanes), x + (tile * TILE + inputs[0]) * 2)
                    dot = dot_shorts(code, at, integers, codes.pick(range(first, first + 2 * at.lanes)))
                    groups = (*sorted({inputs[0] // group, inputs[-1] // group}),)
                    of_step[groups] = of_step[groups] + dot if groups in of_step else dot
                for groups, dot in of_step.items():
                    dot = dot.signed_shift(shift) if shift else dot
                    dots[groups] = dots[groups] + dot if groups in dots else dot
            scaled: Value | None = None
            for groups, dot in dots.items():
                scale = scale_of(code, at, each.scale + tile * (TILE // group * 4), groups)
                numbers = dot.to(floats)
                scaled = numbers * scale if scaled is None else code.fma(numbers, scale, scaled)
            assert scaled is not None
            total.set(code.fma(scaled, of_tile, total.get()))
    added = of_offsets(code, sums, lines, 1, offset=offset, excess=EXCESS[kind])
    some_outs = min(outs, SCALES)
    for first in range(0, outs, some_outs):
        these = slice(first, first + some_outs)
        values, into = totals(products[these]) + totals(added[these]), result + out_size * first
        store_rows(code, values, range(1), some_outs, into, code.whole(0), out_size)


def _codes(code: Code, at: Processor, word: Value, kind: str) -> list[tuple[Value, int]]:
    """For each step, codes that are not negative, int16 [STEP], and by how many bits they are shifted to the
    left: a sum of many is shifted back at once.
    """
    if kind == "e2m1":
        low, high = (part.bits(vector(I16, STEP)) for part in of_e2m1(code, at, word, EXCESS[kind]))
        return [(low & 0xFF, 0), (high & 0xFF, 0), (low >> 8, 0), (high >> 8, 0)]
    codes = (word ^ SIGNS).bits(vector(I16, STEP))
    return [(codes & 0xF, 0), (codes & 0xF0, 4), (codes & 0xF00, 8), (codes >> 12, 0)]
