"""Products of rows of bytes with four-bit weights: x [rows, in], quantized row by row, @ weight [out, in].T.

The codes of weights are read as unsigned bytes, so a sum of products of a group's codes and bytes is an
integer. It is multiplied by the group's scale in float32. What the codes and the group's offset add is the
same for all codes of a group: it is multiplied by the sum of the group's bytes, which is known before.

In the layout of `int4.py`, the low halves of word j's bytes hold the inputs 2 j, 64 + 2 j, 2 j + 1 and
65 + 2 j of a tile, and the high halves those 32 further. CONSECUTIVE brings them into an order in which each
half of the words belongs to one group. `arrange` brings rows of x into this order.
"""

from __future__ import annotations

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import AHEAD, padded, store_rows, totals
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import Processor, dot_small, processor
from pallas_kernels.llvm.types import F32, I8, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value, Variable
from pallas_kernels.products.cpu.int4 import (
    KINDS,
    LOW,
    SCALES_AHEAD,
    Packed,
    alone,
    packed_of,
    tiles_of,
    write_few,
)
from pallas_kernels.products.cpu.multiply import PANEL, heights, quantize, strips
from pallas_kernels.quantization.int4 import SCALES, TILE

SIGNS = 0x88888888 - (1 << 32)  # makes signed four-bit numbers codes that are larger by 8
QUARTER = 32  # inputs of a tile
HALF = QUARTER // 4  # words of a quarter
# Order of a tile's bytes in which low halves of a word are four consecutive inputs, and high halves those 32
# further. Words of the first half hold inputs below 64.
CONSECUTIVE = [
    4 * (2 * (n % HALF) + i // 2) + 2 * (i % 2) + n // HALF for n in range(LANES) for i in range(4)
]
FEW = 48  # maximum rows for which reading weights dominates
Codes = dict[tuple[int, ...], list[tuple[int, int, Value]]]  # see _codes
# results of the call
OUT, BYTES, ROW_SCALES, ARRANGED, SUMS, TRANSFORMED = range(6)


def int4_bytes_module(target: native.Target, x: str, group: int, offset: bool, hadamard: int = 1) -> str:
    """The functions `quantize`, `quantize_parts` and `multiply` of x, values, scale and, if weights have
    offsets, offset.

    Results: out, bytes of x, their scales, the same bytes arranged [rows, whole tiles], their sums by group,
    as many as scales; with a hadamard block above 1, also x transformed, float32.
    """
    at, code = processor(target), Code()
    _arrange(code, group)

    def arrange(frame: Value, row: Value, size: Value) -> None:
        width, tiles = code.word(code.argument(frame, 2)[1], 1), tiles_of(size)
        source, into, sums = (code.result(frame, n)[0] for n in (BYTES, ARRANGED, SUMS))
        places = source + row * size, into + row * tiles * TILE, sums + row * width * 4
        code.call("arrange", VOID, *places, size, width)

    quantize(code, at, x, BYTES, ROW_SCALES, transformed=(hadamard, TRANSFORMED), then=arrange)
    _block(code, "alone", at, group, 1, alone(at), offset=offset, fetch=True)
    _block(code, "single", at, group, 1, 1, offset=offset, fetch=True)
    for height in heights(at):
        for fetch in (False, True):
            _block(code, f"block_{height}_{fetch}", at, group, height, at.outs, offset=offset, fetch=fetch)
    _multiply(code, at, offset)
    return code.text()


def _arrange(code: Code, group: int) -> None:
    """Writes the function `arrange`: of a row's bytes, the address of its arranged bytes, that of its sums,
    the number of bytes, and that of sums.
    """
    source, into, sums, size, width = code.function("arrange", (PTR, PTR, PTR, I64, I64))
    each = group // QUARTER

    def tile(place: Value, index: Value) -> None:
        quarters = [code.load(vector(I8, QUARTER), place + QUARTER * n) for n in range(4)]
        for n, quarter in enumerate(quarters):
            code.store(quarter, into + (index * TILE + QUARTER * (n // 2 + 2 * (n % 2))))
        wide = [quarter.to(vector(I32, QUARTER)) for quarter in quarters]
        for first in range(0, 4, each):
            added = wide[first]
            for other in wide[first + 1 : first + each]:
                added = added + other
            place = sums + (index * (TILE // group) + first // each) * 4
            code.store(code.reduced("add", added).to(F32), place, 4)

    whole = size // TILE
    with code.loop(0, whole) as index:
        tile(source + index * TILE, index)
    rest = size - whole * TILE
    with code.when(rest > 0):
        tile(padded(code, source + whole * TILE, rest, TILE), whole)
    with code.loop(tiles_of(size) * (TILE // group), width) as n:
        code.store(code.constant(F32, 0.0), sums + n * 4, 4)


def _block(
    code: Code, name: str, at: Processor, group: int, rows: int, outs: int, *, offset: bool, fetch: bool
) -> None:
    """Writes a function with this name for a block of this size. It takes (arranged bytes, how many a row
    has, float32 sums of each group's bytes in rows as long as those of scales, scales of rows, *Packed,
    result, bytes of its rows, bytes of its numbers).

    Args:
        fetch: whether weights are prefetched.
    """
    x, x_row, group_sums, row_scale, *packed, result, result_row, out_size = code.function(
        name, (PTR, I64, PTR, PTR, *KINDS, PTR, I64, I64)
    )
    weight = Packed(*packed)
    lines = [weight.at(n) for n in range(outs)]
    if fetch:
        for each in lines:
            for place in (each.scale, each.offset)[: 1 + offset]:
                code.prefetch(place + SCALES_AHEAD)
    sums = [code.variable(code.constant(vector(F32, at.lanes), 0.0)) for _ in range(rows * outs)]
    xs = [x + x_row * row for row in range(rows)]
    with code.loop(0, tiles_of(weight.size)) as tile:
        bytes_of = [[_pieces(code, at, x + (tile * TILE + 64 * half)) for half in range(2)] for x in xs]
        for n, each in enumerate(lines):
            place = each.words + tile * 64
            if fetch:
                code.prefetch(place + AHEAD)
            by_groups = _codes(code, at, code.load(vector(I32), place), group)
            for groups, parts in by_groups.items():
                scale = scale_of(code, at, each.scale + tile * (TILE // group * 4), groups)
                for row, halves in enumerate(bytes_of):
                    dot = code.constant(vector(I32, at.lanes), 0)
                    for half, piece, codes in parts:
                        dot = dot_small(code, at, dot, halves[half][piece], codes)
                    total = sums[row * outs + n]
                    total.set(code.fma(dot.to(vector(F32, at.lanes)), scale, total.get()))
    added = of_offsets(code, group_sums, lines, rows, offset=offset)
    some = min(outs, SCALES)
    for row in range(rows):
        of_row = code.load(F32, row_scale + 4 * row, 4).splat(some)
        for first in range(0, outs, some):
            these = slice(row * outs + first, row * outs + first + some)
            values = (totals(sums[these]) + totals(added[these])) * of_row
            into = result + out_size * first
            store_rows(code, values, range(row, row + 1), some, into, result_row, out_size)


def _pieces(code: Code, at: Processor, place: Value) -> list[Value]:
    """64 bytes as vectors of the processor's size."""
    return [code.load(vector(I8, 4 * at.lanes), place + n) for n in range(0, 64, 4 * at.lanes)]


def _codes(code: Code, at: Processor, word: Value, group: int) -> Codes:
    """For each group of a tile, or for both groups whose codes a vector holds: the codes, from 0 to 15, and
    by which half and piece of a row's arranged bytes they are multiplied.
    """
    ordered = (word ^ SIGNS).bits(vector(I8, 4 * LANES)).pick(CONSECUTIVE).bits(vector(I32))
    out = Codes()
    for half, codes in enumerate((ordered & LOW, (ordered >> 4) & LOW)):
        for piece, first in enumerate(range(0, LANES, at.lanes)):
            last = first + at.lanes - 1
            groups = {(half + 2 * (word // HALF)) * QUARTER // group for word in (first, last)}
            some = codes.pick(range(first, last + 1)) if at.lanes < LANES else codes
            out.setdefault((*sorted(groups),), []).append((half, piece, some.bits(vector(I8, 4 * at.lanes))))
    return out


def scale_of(code: Code, at: Processor, place: Value, groups: tuple[int, ...]) -> Value:
    """A vector of one group's scale, or half of one's and half of the other's."""
    first, *other = (code.load(F32, place + 4 * group, 4).splat(at.lanes) for group in groups)
    lanes = [lane + at.lanes * (lane >= at.lanes // 2) for lane in range(at.lanes)]
    return first.shuffled(other[0], lanes) if other else first


def of_offsets(
    code: Code, sums: Value, lines: list[Packed], rows: int, *, offset: bool, excess: int = 8
) -> list[Variable]:
    """Vectors of sums over groups of (offset - excess * scale) * sum of x, for each row and output.

    Args:
        sums: address of the sums of x by group, float32, in rows as long as those of scales.
        excess: how much larger codes are than numbers.
    """
    kind, scale_row = vector(F32, SCALES), lines[0].scale_row
    added = [code.variable(code.constant(kind, 0.0)) for _ in range(rows * len(lines))]
    by_scale = code.constant(kind, -float(excess))
    with code.loop(0, scale_row, 4 * SCALES) as at:
        of_rows = [code.load(kind, sums + (scale_row * row + at), 4) for row in range(rows)]
        of_rows = of_rows if offset else [of_row * by_scale for of_row in of_rows]
        for n, each in enumerate(lines):
            by = scale = code.load(kind, each.scale + at, 4)
            if offset:
                by = code.fma(scale, by_scale, code.load(kind, each.offset + at, 4))
            for row, of_row in enumerate(of_rows):
                total = added[row * len(lines) + n]
                total.set(code.fma(by, of_row, total.get()))
    return added


def _multiply(code: Code, at: Processor, offset: bool) -> None:
    frame, part, parts = code.kernel("multiply")
    (_, x_shape), (_, shape) = (code.argument(frame, index) for index in (0, 1))
    result, _ = code.result(frame, OUT)
    rows, size, count = code.word(x_shape, 0), code.word(x_shape, 1), code.word(shape, 0)
    weight = packed_of(code, frame, offset, size)
    x, row_scale, sums = (code.result(frame, index)[0] for index in (ARRANGED, ROW_SCALES, SUMS))
    x_row, out_size = tiles_of(size) * TILE, code.result_size(frame, OUT)
    result_row = count * out_size

    def run(name: str, row: Value | int, out: Value) -> None:
        code.call(
            name,
            VOID,
            x + x_row * row,
            x_row,
            sums + weight.scale_row * row,
            row_scale + code.whole(4) * row,
            *weight.at(out),
            result + (result_row * row + out * out_size),
            result_row,
            out_size,
        )

    first, end, last = write_few(code, at, rows, count, (part, parts), run)
    panel = (rows > FEW).choose(code.whole(PANEL), at.outs)
    with code.loop(first, end, panel) as start:
        over = (start + panel).least(end)
        begin = start.least(last)
        with strips(code, at, rows) as (row, height), code.loop(begin, over, at.outs) as outs:
            out = outs.least(over - at.outs)
            with code.cases(height + row.equals(0).choose(code.whole(8), 0)) as case:
                for number in heights(at):
                    for fetch in (False, True):
                        with case(number + 8 * fetch):
                            run(f"block_{number}_{fetch}", row, out)
