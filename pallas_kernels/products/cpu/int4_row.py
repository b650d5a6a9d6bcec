"""A single row times four-bit weights, where a processor cannot multiply pairs of bfloat16 numbers.

Shifting, converting and scaling each weight would take most of the time. So nothing is shifted but half of
the codes, by four bits: byte k of a word is masked, and converted to 256^k times its code. The row's numbers
are divided by 256^k before. A group's sum is multiplied by its scale. What codes are larger by than numbers,
and a group's offset, is multiplied by the sum of the row's numbers in the group, as in `int4_bytes.py`.
"""

from __future__ import annotations

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import AHEAD, padded, store_rows, totals
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES, Processor, as_floats, processor
from pallas_kernels.llvm.types import F32, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.int4 import KINDS, LOW, SCALES_AHEAD, STEPS, Packed, of_e2m1, packed_of
from pallas_kernels.products.cpu.int4_bytes import SIGNS, of_offsets, scale_of, tiles_of
from pallas_kernels.products.cpu.multiply import blocks_of
from pallas_kernels.quantization.int4 import E2M1, SCALES, TILE

STEP = TILE // STEPS  # inputs
VECTOR = 4 * LANES  # bytes
EXCESS = {"int4": 8, "e2m1": E2M1[-1]}  # of codes over numbers, by kind


def int4_row_module(target: native.Target, x: str, group: int, offset: bool, kind: str = "int4") -> str:
    """The module of a function `multiply` of x [1, in], values, scale and, if there are offsets, offset."""
    at, code = processor(target), Code()
    _arrange(code, at, x, group)
    outs = at.outs * (2 if at.lanes == LANES else 1)
    for at_once in (outs, 1):
        _block(code, f"block_{at_once}", at, group, at_once, offset=offset, kind=kind)
    frame, part, parts = code.kernel("multiply")
    (source, shape), (_, values) = (code.argument(frame, index) for index in (0, 1))
    (result, _), out_size = code.result(frame, 0), code.result_size(frame, 0)
    size, count = code.word(shape, 1), code.word(values, 0)
    weight = packed_of(code, frame, offset, size)
    # each thread arranges the row: it is short beside the weights
    arranged, sums = code.memory(tiles_of(size) * (4 * TILE)), code.memory(weight.scale_row)
    code.call("arrange", VOID, source, arranged, sums, size, weight.scale_row)

    def run(outs: int) -> None:
        begin, end, last = blocks_of(count, outs, part, parts)
        with code.loop(begin, end, outs) as start:
            out = start.least(last)  # overlapping blocks write the same results
            into = result + out * out_size
            code.call(f"block_{outs}", VOID, arranged, sums, *weight.at(out), into, out_size)

    with code.if_else(count < outs) as (few, many):
        with few:
            run(1)
        with many:
            run(outs)
    return code.text()


def _arrange(code: Code, at: Processor, x: str, group: int) -> None:
    """Writes the function `arrange`: of a row, the addresses of its arranged numbers and of their sums by
    group, the number of inputs, and bytes of sums. Of 32 inputs, the even ones come first.
    """
    source, into, sums, size, sums_size = code.function("arrange", (PTR, PTR, PTR, I64, I64))
    item, each = SIZES[x], max(group // STEP, 1)

    def tile(place: Value, index: Value) -> None:
        pairs = []  # sums of an even input and the next
        for step in range(STEPS):
            numbers = as_floats(code, at, place + step * STEP * item, x, STEP)
            even, odd = (numbers.pick(range(half, STEP, 2)) for half in range(2))
            for half, some in enumerate((even, odd)):
                to = into + (index * (4 * TILE) + (2 * step + half) * VECTOR)
                code.store(some * 256.0 ** -(step // 2 + 2 * half), to)
            pairs.append(even + odd)
        for first in range(0, STEPS, each):
            added = pairs[first]
            for other in pairs[first + 1 : first + each]:
                added = added + other
            for n, lane in enumerate(range(0, LANES, min(group // 2, LANES))):
                total = code.sum(added.pick(range(lane, lane + min(group // 2, LANES))))
                code.store(total, sums + (index * (TILE // group) + (first * STEP // group + n)) * 4, 4)

    whole = size // TILE
    with code.loop(0, whole) as index:
        tile(source + index * (TILE * item), index)
    rest = size - whole * TILE
    with code.when(rest > 0):
        tile(padded(code, source + whole * (TILE * item), rest * item, TILE * item), whole)
    with code.loop(tiles_of(size) * (TILE // group * 4), sums_size, 4) as place:
        code.store(code.constant(F32, 0.0), sums + place, 4)


def _block(code: Code, name: str, at: Processor, group: int, outs: int, *, offset: bool, kind: str) -> None:
    """Writes a function of (arranged x, its sums, *Packed, result, bytes of its numbers) that multiplies by
    `outs` outputs.
    """
    x, sums, *packed, result, out_size = code.function(name, (PTR, PTR, *KINDS, PTR, I64))
    weight, floats = Packed(*packed), vector(F32, at.lanes)
    lines = [weight.at(n) for n in range(outs)]
    for each in lines:
        for place in (each.scale, each.offset)[: 1 + offset]:
            code.prefetch(place + SCALES_AHEAD)
    products = [code.variable(code.constant(floats, 0.0)) for _ in lines]
    with code.loop(0, tiles_of(weight.size)) as tile:
        for each, total in zip(lines, products, strict=True):
            place = each.words + tile * VECTOR
            code.prefetch(place + AHEAD)
            codes = _codes(code, at, code.load(vector(I32), place), kind)
            dots: dict[tuple[int, ...], Value] = {}  # by the groups of a vector's inputs
            for step in range(STEPS):
                for word in range(0, LANES, at.lanes):
                    some = codes[step % 2].pick(range(word, word + at.lanes))
                    ends = word, word + at.lanes - 1
                    groups = (*sorted({(step * STEP + 2 * end) // group for end in ends}),)
                    for half in range(2):
                        byte = step // 2 + 2 * half
                        number = (some & (0xFF << 8 * byte) - (byte // 3 << 32)).to(floats)
                        vector_of_x = x + (tile * (4 * TILE) + ((2 * step + half) * LANES + word) * 4)
                        part = code.load(floats, vector_of_x)
                        known = dots.get(groups)
                        dots[groups] = number * part if known is None else code.fma(number, part, known)
            for groups, dot in dots.items():
                scale = scale_of(code, at, each.scale + tile * (TILE // group * 4), groups)
                total.set(code.fma(dot, scale, total.get()))
    added = of_offsets(code, sums, lines, 1, offset=offset, excess=EXCESS[kind])
    some_outs = min(outs, SCALES)
    for first in range(0, outs, some_outs):
        these = slice(first, first + some_outs)
        values, into = totals(products[these]) + totals(added[these]), result + out_size * first
        store_rows(code, values, range(1), some_outs, into, code.whole(0), out_size)


def _codes(code: Code, at: Processor, word: Value, kind: str) -> list[Value]:
    """Low and high halves of a word's bytes as codes that are not negative."""
    if kind == "e2m1":
        return of_e2m1(code, at, word, EXCESS[kind])
    word = word ^ SIGNS
    return [word & LOW, (word >> 4) & LOW]
