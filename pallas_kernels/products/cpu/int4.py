"""Products with four-bit weights: x [rows, in] @ weight [out, in].T, for any number of rows.

Weights are unpacked to the dtype in which they are multiplied: bfloat16 if x is bfloat16 and the processor
multiplies pairs of bfloat16 faster, otherwise float32. For a single row, they are unpacked in registers. For
several rows, a panel of outputs is unpacked once and stays in the processor's cache while all rows are
multiplied by it. Both ways give the same weights and add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import AHEAD, NONE, Operands, padded, store_rows, totals, zeros
from pallas_kernels.llvm.code import LINE, Code
from pallas_kernels.llvm.formats import SIZES, Format, Processor, plain_format, processor
from pallas_kernels.llvm.types import BF16, F32, I8, I16, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.multiply import PANEL, blocks_of, dispatch, strips
from pallas_kernels.quantization.int4 import E2M1, TILE

UNPACKED_FEW = 16  # maximum rows for which reading weights dominates
SCRATCH = 1 << 17  # bytes of unpacked weights on the stack
STEPS = 4  # of 32 inputs in a tile, which has LANES words
SCALES_AHEAD = 512  # prefetch distance for scales and offsets in bytes
LOW = 0x0F0F0F0F  # of all bytes of a word
PSHUFB = {8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}  # by lanes: looks bytes up in 16
# the number of each four-bit code
TABLES = {"int4": [n - 16 * (n > 7) for n in range(16)], "e2m1": [*E2M1, *(-n for n in E2M1)]}


class Packed(NamedTuple):
    """Packed weights [outs, size]: addresses, and int64.

    Attributes:
        row, scale_row: bytes from one output to the next, of words, and of scales and of offsets.
        size: inputs.
    """

    words: Value
    row: Value
    scale: Value
    offset: Value
    scale_row: Value
    size: Value

    def at(self, out: Value | int) -> Packed:
        """The weights from this output on."""
        by_scale = self.scale_row * out
        return self._replace(
            words=self.words + self.row * out, scale=self.scale + by_scale, offset=self.offset + by_scale
        )

    def after(self, inputs: Value, group: int) -> Packed:
        """The weights from the input on that follows these, a multiple of TILE."""
        by_scale = inputs // group * 4
        return self._replace(
            words=self.words + inputs // 2, scale=self.scale + by_scale, offset=self.offset + by_scale
        )


KINDS = (PTR, I64, PTR, PTR, I64, I64)  # of Packed


def packed_of(code: Code, frame: Value, offset: bool, size: Value) -> Packed:
    """The weights of a call: arguments 1 to 3 are values, scale and, if weights have offsets, offset."""
    (words, shape), (scale, scale_shape) = (code.argument(frame, index) for index in (1, 2))
    offsets = code.argument(frame, 3)[0] if offset else scale
    return Packed(words, code.word(shape, 1) * 4, scale, offsets, code.word(scale_shape, 1) * 4, size)


@dataclass(frozen=True)
class Int4Format:
    """Parameters of the generated code.

    Attributes:
        format: how unpacked weights are multiplied; they are unpacked to its dtype of weights.
        group: inputs per scale.
        offset: weights have offsets.
        kind: `Int4.kind`.
    """

    at: Processor
    format: Format
    group: int
    offset: bool
    kind: str


def tiles_of(size: Value) -> Value:
    """Tiles of this many inputs, of which the last may be partial."""
    return (size + (TILE - 1)) // TILE


def alone(at: Processor) -> int:
    """Outputs by which a single row is multiplied at once. With few, each sum would wait for its previous
    term.
    """
    return at.outs * (2 if at.lanes == LANES else 1)


def in_pairs(at: Processor, x: str) -> bool:
    """Whether weights are multiplied as pairs of bfloat16."""
    return at.fast_pairs and at.lanes == LANES and x == "bfloat16"


def int4_module(target: native.Target, x: str, group: int, offset: bool, kind: str = "int4") -> str:
    """The module of a function `multiply` with arguments x, values, scale and, if weights have offsets,
    offset.
    """
    at, code = processor(target).for_floats(), Code()
    form = plain_format(at, x, "bfloat16" if in_pairs(at, x) else "float32")
    fmt = Int4Format(at, form, group, offset, kind)
    _single(code, "alone", fmt, alone(at))
    _single(code, "single", fmt, 1)
    _unpack(code, fmt)
    dispatch(code, "unpacked", at, fmt.format, False, (NONE,))
    _multiply(code, fmt)
    return code.text()


def _multiply(code: Code, fmt: Int4Format) -> None:
    at = fmt.at
    frame, part, parts = code.kernel("multiply")
    (x, x_shape), (_, shape) = (code.argument(frame, index) for index in (0, 1))
    result, _ = code.result(frame, 0)
    rows, size, count = code.word(x_shape, 0), code.word(x_shape, 1), code.word(shape, 0)
    weight = packed_of(code, frame, fmt.offset, size)
    x_row, out_size = size * SIZES[fmt.format.x], code.result_size(frame, 0)
    result_row = count * out_size

    def one_row(name: str, row: Value | int, out: Value) -> None:
        into = result + (result_row * row + out * out_size)
        code.call(name, VOID, x + x_row * row, *weight.at(out), into, out_size)

    first, end, last = write_few(code, at, rows, count, (part, parts), one_row)
    # rows begin in different sets of a cache
    unpacked_row = weight.row * (2 * SIZES[fmt.format.weight]) + 3 * LINE
    many = (SCRATCH // unpacked_row).rounded_down(at.outs).least(PANEL).most(at.outs)
    panel = (rows > UNPACKED_FEW).choose(many, at.outs)
    scratch = code.memory(unpacked_row * panel)
    unused = Operands(*[scratch] * len(Operands._fields))
    with code.loop(first, end, panel) as start:
        over = (start + panel).least(end)
        begin = start.least(last)
        code.call("unpack", VOID, *weight.at(begin), over - begin, scratch, unpacked_row)
        with strips(code, at, rows) as (row, height), code.loop(begin, over, at.outs) as outs:
            out = outs.least(over - at.outs)
            operands = unused._replace(
                x=x + row * x_row,
                x_row=x_row,
                weight=scratch + (out - begin) * unpacked_row,
                weight_row=unpacked_row,
                size=size,
                before=code.whole(0),
                after=code.whole(0),
                result=result + (row * result_row + out * out_size),
                result_row=result_row,
                out_size=out_size,
                rate=size,
            )
            code.call("unpacked", VOID, *operands, height, at.outs, NONE)


def write_few(
    code: Code,
    at: Processor,
    rows: Value,
    count: Value,
    share: tuple[Value, Value],
    run: Callable[[str, Value | int, Value], None],
) -> tuple[Value, Value, Value]:
    """Writes what multiplies a single row, and by a weight with fewer outputs than a block, and returns then.

    Args:
        share: the part, and the number of parts.
        run: calls the function "single", for one output, or "alone", for as many, with a row and the first
            output.

    Returns:
        `blocks_of` of outputs, for other rows.
    """
    first, end, last = blocks_of(count, at.outs, *share)
    single, at_once = rows.equals(1), alone(at)
    with code.when(count < single.choose(code.whole(at_once), at.outs)):
        with code.loop(first, end) as out, code.loop(0, rows) as row:
            run("single", row, out)
        code.ret()
    with code.when(single):
        begin, until, final = blocks_of(count, at_once, *share)
        with code.loop(begin, until, at_once) as out:
            run("alone", 0, out.least(final))  # overlapping blocks write the same results
        code.ret()
    return first, end, last


def _single(code: Code, name: str, fmt: Int4Format, outs: int) -> None:
    """Writes the function `name` of (x, *Packed, result, bytes of its numbers), which multiplies one row by
    `outs` outputs and prefetches weights AHEAD bytes.
    """
    x, *packed, result, out_size = code.function(name, (PTR, *KINDS, PTR, I64))
    weight, form, x_size = Packed(*packed), fmt.format, SIZES[fmt.format.x]
    lines = [weight.at(n) for n in range(outs)]
    for each in lines:
        for place in (each.scale, each.offset)[: 1 + fmt.offset]:
            code.prefetch(place + SCALES_AHEAD)
    sums = zeros(code, form, outs)

    def multiply(x: Value, tile: Value) -> None:
        for each, total in zip(lines, sums, strict=True):
            for n, weights in enumerate(weights_of(code, fmt, each, tile)):
                total.set(form.dot(code, total.get(), form.load_x(code, x + n * form.step * x_size), weights))

    tiles = weight.size // TILE
    with code.loop(0, tiles) as tile:
        multiply(x + tile * (TILE * x_size), tile)
    rest = weight.size - tiles * TILE
    with code.when(rest > 0):  # a partial tile
        multiply(padded(code, x + tiles * (TILE * x_size), rest * x_size, TILE * x_size), tiles)
    store_rows(code, totals(sums), range(1), outs, result, code.whole(0), out_size)


def _unpack(code: Code, fmt: Int4Format) -> None:
    """Writes the function `unpack` of (*Packed, number of outputs, address, bytes of a row), which unpacks
    the weights of consecutive outputs, each padded to whole tiles.
    """
    *packed, count, into, into_row = code.function("unpack", (*KINDS, I64, PTR, I64))
    weight, item = Packed(*packed), SIZES[fmt.format.weight]
    tiles = tiles_of(weight.size)
    with code.loop(0, count) as each:
        line, target = weight.at(each), into + each * into_row
        with code.loop(0, tiles) as tile:
            for n, weights in enumerate(weights_of(code, fmt, line, tile)):
                code.store(weights, target + (tile * (TILE * item) + n * fmt.format.step * item))


def weights_of(code: Code, fmt: Int4Format, packed: Packed, tile: Value) -> list[Value]:
    """Loads the weights of the first output's tile, in order, for `how.format`. Prefetches words AHEAD
    bytes.
    """
    place, by_scale = packed.words + tile * (4 * LANES), tile * (4 * (TILE // fmt.group))
    for line in range(0, 4 * LANES, LINE):
        code.prefetch(place + (AHEAD + line))
    word, out = code.load(vector(I32), place), []
    each, convert = max(fmt.group // 32, 1), _pairs if fmt.format.weight == "bfloat16" else _floats
    for first in range(0, STEPS, each):
        # of the group, or of both groups in a step's words
        scales = [
            [
                code.load(F32, base + by_scale + 4 * group, 4).splat()
                for base in (packed.scale, packed.offset)[: 1 + fmt.offset]
            ]
            for group in range(first * 32 // fmt.group, -(-(first + 1) * 32 // fmt.group))
        ]
        out += convert(code, fmt, word, range(first, first + each), scales)
    return out


def _pairs(
    code: Code, fmt: Int4Format, word: Value, steps: Sequence[int], scales: list[list[Value]]
) -> list[Value]:
    """bfloat16 weights, looked up in a table of a group's sixteen possible weights."""
    numbers = code.constant(vector(F32), [float(n) for n in TABLES[fmt.kind]])
    first, last = (
        code.call(
            "llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BF16), _scaled(code, numbers, *scales[place])
        ).bits(vector(I16))
        for place in (0, -1)
    )
    # of one group, two copies: the fifth bit of an index belongs to another number
    table, out = first.shuffled(last, range(2 * LANES)), []
    for step in steps:
        index = word >> 4 * step if step else word
        if len(scales) == 2:  # the fifth bit says which group's
            of_last = [0x10_0010 * (lane >= LANES // 2) for lane in range(LANES)]
            index = index & 0xF_000F | code.constant(vector(I32), of_last)
        known = code.call("llvm.x86.avx512.permvar.hi.512", table.kind, table, index.bits(table.kind))
        out.append(known.bits(vector(BF16, 2 * LANES)))
    return out


def _floats(
    code: Code, fmt: Int4Format, word: Value, steps: Sequence[int], scales: list[list[Value]]
) -> list[Value]:
    """float32 weights."""
    out, size = [], fmt.format.step
    by_word = scales[0]
    if len(scales) == 2:
        lanes = [lane + LANES * (lane >= LANES // 2) for lane in range(LANES)]
        by_word = [first.shuffled(last, lanes) for first, last in zip(*scales, strict=True)]
    numbers_of = of_e2m1(code, fmt.at, word) if fmt.kind == "e2m1" else []
    for step in steps:
        halves = []  # the even inputs and the odd ones
        for half in range(2):
            if numbers_of:
                bits, up, size_of = numbers_of[step % 2], 24 - 8 * (step // 2 + 2 * half), 8
            else:
                bits, up, size_of = word, 28 - 4 * step - 16 * half, 4
            numbers = (bits << up if up else bits).signed_shift(32 - size_of).to(vector(F32))
            halves.append(_scaled(code, numbers, *by_word))
        lanes = [n // 2 + LANES * (n % 2) for n in range(2 * LANES)]
        even, odd = halves
        out += [even.shuffled(odd, lanes[start : start + size]) for start in range(0, 2 * LANES, size)]
    return out


def _scaled(code: Code, numbers: Value, scale: Value, offset: Value | None = None) -> Value:
    return numbers * scale if offset is None else code.fma(numbers, scale, offset)


def of_e2m1(code: Code, at: Processor, word: Value, excess: int = 0) -> list[Value]:
    """The numbers of words of e2m1 codes, and an excess, in bytes: of codes in low halves of bytes, and in
    high ones.
    """
    size = 4 * at.lanes
    table = [number + excess for number in TABLES["e2m1"]] * (size // 16)

    def looked_up(codes: Value) -> Value:
        if at.lanes in PSHUFB:
            pieces = [codes.pick(range(n, n + size)) for n in range(0, 4 * LANES, size)]
            first, *other = (
                code.call(PSHUFB[at.lanes], piece.kind, code.constant(piece.kind, table), piece)
                for piece in pieces
            )
            return first.shuffled(other[0], range(4 * LANES)) if other else first
        signed = (codes ^ 8) - 8
        magnitude = signed & 7
        magnitude = magnitude + (magnitude - 4).most(0) + (magnitude - 6).most(0) * 2
        return (signed < 0).choose(excess - magnitude, magnitude + excess)

    halves = [(word >> bits & LOW).bits(vector(I8, 4 * LANES)) for bits in (0, 4)]
    return [looked_up(half).bits(vector(I32)) for half in halves]
