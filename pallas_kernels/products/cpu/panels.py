"""Products for many rows, of bfloat16 pairs or of bytes: x [rows, in] @ weight [out, in].T as functions of
(frame, part, parts). A part is a panel of outputs for a block of rows. `int4_panels.py` has four-bit weights.

Inputs are multiplied in words of 32 bits: two bfloat16, or four bytes. A panel of outputs is packed so that
a vector has one word of each of its outputs. A word of a row of x is broadcast to all lanes. So sums need not
be added up over lanes at the end, as in `multiply.py`, and the packed words of a panel stay in the cache
while all rows of a block are multiplied by them (Goto and van de Geijn, 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from pallas_kernels.llvm import formats, native
from pallas_kernels.llvm.blocks import rounded, transposed, zeros
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES, Format, Processor, byte_format, plain_format, processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.llvm.team import PARTS
from pallas_kernels.llvm.types import F32, I8, I16, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value, Variable
from pallas_kernels.products.cpu.multiply import heights, quantize, strips
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.int4 import GROUPS

WORD, VECTOR = 4, 4 * LANES  # bytes
OUTS = 64  # outputs of a panel, and the minimum for a weight
LINE = WORD * OUTS  # bytes of a word of inputs of all outputs of a panel
WORDS, ROWS = 384, 768  # maximum words that are packed at a time, and rows of a block
HALF = 0x0F0F0F0F  # of each byte of a word
SHORT = 8  # words of products by four-bit codes whose sum fits in 16 bits: 8 * 4 / 2 * 15 * 128 < 2 ** 15
LEAST = 96  # rows of a block, if there are others

# Writes the packing of a panel, given the frame, the first output, the first byte of a row of x, the number
# of words, and the address of [words, OUTS] words.
Pack = Callable[[Value, Value, Value, Value, Value], None]


class Shape(NamedTuple):
    """The block whose sums a strip keeps in registers: at most `rows` rows, by vectors of outputs. A panel of
    several blocks is packed as [OUTS // outs, WORDS, outs] words.
    """

    lanes: int
    vectors: int
    rows: int

    @property
    def bytes(self) -> int:
        """The size of a vector."""
        return WORD * self.lanes

    @property
    def outs(self) -> int:
        return self.vectors * self.lanes

    def place(self, word: Value, out: Value) -> Value:
        """Bytes from a panel's beginning to a word of 16 outputs, of which `out` is the first."""
        return word * LINE + out * WORD if self.outs == OUTS else word * VECTOR + out * (WORDS * WORD)


def shape_of(at: Processor, sums: int = 1) -> Shape:
    """The shape for a processor's registers, which hold this number of sums for each result."""
    return Shape(at.lanes, OUTS // LANES if at.lanes == LANES else 2, 6 // sums)


def serves(at: Processor, x: str, weight: WeightFormat) -> bool:
    """Whether a processor multiplies x by weights of this format in vectors of words: AMD's with AVX-512's
    products of pairs bfloat16 by bfloat16 and int4, those with AVX2 w8a8 and w4a8.
    """
    if weight.inputs is None:  # pairs of bfloat16
        pairs = at.fast_pairs and at.lanes == LANES
        return x == "bfloat16" and (weight.bits == 4 or weight.numbers == x) and pairs
    return x in INPUTS and weight.inputs == "int8" and at.bytes in ("vnni", "madd")


def panels_serve(x: str, weight: WeightFormat, outs: int, size: int) -> bool:
    """Whether this processor multiplies rows of x by weights [outs, size] of this format by panels."""
    fits = outs >= OUTS and size % inputs_at_once(weight) == 0
    return fits and serves(processor(native.host()), x, weight)


def inputs_at_once(weight: WeightFormat) -> int:
    """A weight of this format has a multiple of this number of inputs: those of a vector, or those of the
    smallest group.
    """
    return GROUPS[0] if weight.group else VECTOR * 8 // weight.bits


class StripOperands(NamedTuple):
    """Arguments of a function that multiplies a strip of rows by packed words: addresses, and int64.

    Attributes:
        x: the first row's first packed word; x_row: bytes from one row to the next.
        packed: packed words of the strip's outputs; words: their number.
        sums: 32-bit, of the words before, LINE bytes from one row to the next.
        before, after: whether there are words before, and after, these.
        result: of the first row's first output; result_row: bytes from one row to the next.
        out_size: bytes of a number of the result.
        row_scale, row_sum, out_scale: for bytes, see `blocks.Operands`. By groups, out_scale is float32
            [groups, 2, OUTS]: scales and, with offsets, what the sums of the row's bytes are multiplied by,
            which row_sum has as float32. Without offsets it has int32, to which products are added.
        row_sums: bytes from one row's sums to the next.
    """

    x: Value
    x_row: Value
    packed: Value
    words: Value
    sums: Value
    before: Value
    after: Value
    result: Value
    result_row: Value
    out_size: Value
    row_scale: Value
    row_sum: Value
    out_scale: Value
    row_sums: Value


KINDS = (PTR, I64, PTR, I64, PTR, I64, I64, PTR, I64, I64, PTR, PTR, PTR, I64)  # of StripOperands


def pairs_module(target: native.Target) -> str:
    """The functions `multiply`, of x and weight, and `parts`, for what `panels_serve`."""
    at, code = processor(target), Code()
    fmt = plain_format(at, "bfloat16", "bfloat16")
    write(code, at, fmt, _stored(code, at, fmt))
    return code.text()


def bytes_module(target: native.Target, x: str, hadamard: int = 1) -> str:
    """The functions `quantize`, `quantize_parts`, `multiply` and `parts`, with arguments and results as in
    `multiply.bytes_module`, to the last bit.
    """
    at, code = processor(target), Code()
    fmt = replace(byte_format(at), offset=128)
    quantize(code, at, x, 1, 2, sums=(fmt.offset, 3), transformed=(hadamard, 4))
    write(code, at, fmt, _stored(code, at, fmt))
    return code.text()


def write(
    code: Code, at: Processor, fmt: Format, pack: Pack, group: int | None = None, offset: bool = False
) -> None:
    """Writes the functions `multiply` and `parts`. If x is quantized, its bytes, scales and sums are results
    1 to 3.

    Args:
        group, offset: inputs whose sums have a scale, and maybe an offset, of their own, see `StripOperands`.
            `pack` writes these behind WORDS words.
    """
    halves = _halves(at, fmt)
    shape, chunk = shape_of(at, 2 if group or halves > 1 else 1), WORDS // max(halves, 1) * WORD
    at = replace(at, rows=shape.rows)
    _strip(code, at, shape, fmt, group, offset)
    frame, many = code.function("parts", (PTR, I64), internal=False, result=I64)
    rows, count = _shape(code, frame)
    panels = _panels(count)
    # Two for each thread, unless blocks become so small that packing takes long.
    wanted = (many // (PARTS // 2) + (panels - 1)) // panels
    blocks = wanted.least((rows + (LEAST - 1)) // LEAST).most((rows + (ROWS - 1)) // ROWS)
    code.ret(panels * blocks)

    frame, part, parts = code.kernel("multiply")
    x, x_shape = code.argument(frame, 0)
    (rows, count), row_bytes = _shape(code, frame), code.word(x_shape, 1) * SIZES[fmt.x]
    row_scale, row_sum, out_scale, row_sums = x, x, x, code.whole(4)
    if fmt.x == "int8":
        x, row_scale, row_sum = (code.result(frame, index)[0] for index in (1, 2, 3))
        out_scale, _ = code.argument(frame, 2)
    if group:
        row_sums = code.word(code.result(frame, 3)[1], 1) * 4
    (result, _), out_size, blocks = code.result(frame, 0), code.result_size(frame, 0), parts // _panels(count)
    # blocks of nearly equal size
    block_rows = (rows + (blocks * at.rows - 1)) // (blocks * at.rows) * at.rows
    by_group = 2 * WORDS * WORD // group if group else 0  # lines of scales
    packed, sums = code.memory((WORDS + by_group) * LINE), code.memory(ROWS * LINE)
    o = (part // blocks * OUTS).least(count - OUTS)  # the last may overlap: both compute equal results
    begin = part % blocks * block_rows
    with code.loop(0, row_bytes, chunk) as first:
        taken = (row_bytes - first).least(chunk)
        pack(frame, o, first, taken // WORD, packed)
        with (
            code.loop(0, OUTS, shape.outs) as out,
            strips(code, at, (rows - begin).least(block_rows)) as (row, height),
        ):
            summed = row_sum + (begin + row) * row_sums
            call = StripOperands(
                x=x + ((begin + row) * row_bytes + first),
                x_row=row_bytes,
                packed=packed + shape.place(code.whole(0), out),
                words=taken // WORD,
                sums=sums + (row * LINE + out * WORD),
                before=first,
                after=row_bytes - first - taken,
                result=result + ((begin + row) * count + o + out) * out_size,
                result_row=count * out_size,
                out_size=out_size,
                row_scale=row_scale + (begin + row) * 4,
                row_sum=summed + first // group * 4 if group else summed,
                out_scale=(packed + WORDS * LINE if group else out_scale + o * 4) + out * 4,
                row_sums=row_sums,
            )
            code.call("strip", VOID, *call, height)


def _shape(code: Code, frame: Value) -> tuple[Value, Value]:
    """Rows and outputs of the result."""
    _, shape = code.result(frame, 0)
    return code.word(shape, 0), code.word(shape, 1)


def _panels(outs: Value) -> Value:
    return (outs + (OUTS - 1)) // OUTS


def _stored(code: Code, at: Processor, fmt: Format) -> Pack:
    """Packs weights that are stored as x is. Bytes become unsigned by their offset."""
    _pack(code, shape_of(at), fmt, _halves(at, fmt))

    def pack(frame: Value, o: Value, first: Value, words: Value, to: Value) -> None:
        weight, shape = code.argument(frame, 1)
        row_bytes = code.word(shape, 1) * SIZES[fmt.x]
        code.call("pack", VOID, weight + (o * row_bytes + first), row_bytes, words, to)

    return pack


def _halves(at: Processor, fmt: Format) -> int:
    """Parts of weights whose products are summed in 16 bits first, as without VNNI: codes, or the lower and
    the upper halves of bytes. 0: all sums have 32 bits.
    """
    return (2 if fmt.offset else 1) if fmt.x == "int8" and at.bytes == "madd" else 0


def _pack(code: Code, shape: Shape, fmt: Format, halves: int) -> None:
    """Writes the function `pack` of a panel's weights, the bytes from one output to the next, the number of
    words, and the place of the panel.
    """
    weight, row, words, to = code.function("pack", (PTR, I64, I64, PTR))
    flipped = code.constant(vector(I8, VECTOR), -128).bits(vector(I32))
    with code.loop(0, words, LANES) as word, code.loop(0, OUTS, LANES) as out:
        places = [weight + ((out + lane) * row + word * WORD) for lane in range(LANES)]
        for place in places:
            code.prefetch(place + WORDS * WORD, far=True)
        lines = transposed([code.load(vector(I32), place) for place in places])
        for line, turned in enumerate(lines):
            values = turned ^ flipped if fmt.offset else turned
            parts = [(values >> 4 * half) & HALF for half in range(halves)] or [values]
            for half, part in enumerate(parts):
                code.store(part, to + shape.place((word + line) * len(parts) + half, out), VECTOR)


def _strip(code: Code, at: Processor, shape: Shape, fmt: Format, group: int | None, offset: bool) -> None:
    """Writes the function `strip` of StripOperands and the number of rows, one of `heights`."""
    for height in heights(at):
        operands = StripOperands(*code.function(f"strip_{height}", KINDS))
        strip = _Strip(code, shape, fmt, height, _halves(at, fmt), operands)
        if group:
            strip.multiply_by_group(group, offset)
        else:
            strip.multiply()
    *call, rows = code.function("strip", (*KINDS, I64))
    with code.cases(rows) as case:
        for height in heights(at):
            with case(height):
                code.call(f"strip_{height}", VOID, *call)


class _Strip(NamedTuple):
    """Writes the code for a strip of this many rows. Sums are vectors, row by row. halves: see `_halves`."""

    code: Code
    shape: Shape
    fmt: Format
    rows: int
    halves: int
    call: StripOperands

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """The row of each vector of sums, and its place in the row."""
        return [(row, n) for row in range(self.rows) for n in range(self.shape.vectors)]

    def multiply(self) -> None:
        sums = zeros(self.code, self.fmt, len(self.numbers))
        self._resume(sums)
        self._add(sums, self.code.whole(0), self.call.words)
        with self._end(sums):
            values = [total.get() for total in sums]
            self._store(self._scaled(values) if self.fmt.offset else values)

    def multiply_by_group(self, group: int, offset: bool) -> None:
        code, call = self.code, self.call
        kind, each = vector(F32, self.shape.lanes), group // WORD
        of_group = zeros(code, self.fmt, len(self.numbers))
        sums = [code.variable(code.constant(kind, 0.0)) for _ in of_group]
        self._resume(sums)
        with code.loop(0, call.words, each) as first:
            index = first // each
            of_rows = [call.row_sum + (call.row_sums * row + index * 4) for row in range(self.rows)]
            for (row, _), total in zip(self.numbers, of_group, strict=True):
                total.set(code.constant(self.fmt.sums, 0) if offset else self._splat(I32, of_rows[row]))
            self._add(of_group, first, (first + each).least(call.words))
            lines = [call.out_scale + (index * 2 + line) * LINE for line in range(1 + offset)]
            scales, *by_sum = (self._vectors(kind, line) for line in lines)
            for (row, out), total, known in zip(self.numbers, of_group, sums, strict=True):
                before = known.get()
                for factor in by_sum:
                    before = code.fma(factor[out], self._splat(F32, of_rows[row]), before)
                known.set(code.fma(total.get().to(kind), scales[out], before))
        with self._end(sums):
            of_rows = self._of_rows(F32, call.row_scale)
            self._store(
                [of_rows[row] * total.get() for (row, _), total in zip(self.numbers, sums, strict=True)]
            )

    def _splat(self, kind: Any, place: Value) -> Value:
        return self.code.load(kind, place, 4).splat(self.shape.lanes)

    def _of_rows(self, kind: Any, place: Value) -> list[Value]:
        """Numbers of the rows, each in all lanes."""
        return [self._splat(kind, place + row * 4) for row in range(self.rows)]

    def _vectors(self, kind: Any, line: Value) -> list[Value]:
        """Loads a vector for each of the outputs' vectors."""
        size = self.shape.bytes
        return [self.code.load(kind, line + n * size, size) for n in range(self.shape.vectors)]

    def _resume(self, sums: list[Variable]) -> None:
        """Loads the sums of the words before, if there are any."""
        with self.code.when(self.call.before > 0):
            for total, place in zip(sums, self._places(), strict=True):
                total.set(self.code.load(total.kind, place, self.shape.bytes))

    @contextmanager
    def _end(self, sums: list[Variable]) -> Iterator[None]:
        """Stores the sums if words follow; else what is written within."""
        with self.code.if_else(self.call.after > 0) as (more, end):
            with more:
                for total, place in zip(sums, self._places(), strict=True):
                    self.code.store(total.get(), place, self.shape.bytes)
            with end:
                yield

    def _places(self) -> list[Value]:
        """Addresses of vectors of sums."""
        return [self.call.sums + (row * LINE + n * self.shape.bytes) for row, n in self.numbers]

    def _add(self, sums: list[Variable], first: Value, end: Value) -> None:
        """Adds products of these words to sums."""
        if self.halves:
            self._add_short(sums, first, end)
            return
        size = self.shape.bytes
        with self.code.loop(first, end) as word:
            line = self._line(word)
            # they are packed as x is
            weights = [self.fmt.load_x(self.code, line + n * size) for n in range(self.shape.vectors)]
            for row in range(self.rows):
                mine = self._word(row, word, weights[0].kind)
                for n, other in enumerate(weights):
                    total = sums[row * self.shape.vectors + n]
                    total.set(self.fmt.dot(self.code, total.get(), mine, other))

    def _add_short(self, sums: list[Variable], first: Value, end: Value) -> None:
        """Adds products of these words, a multiple of SHORT, to sums: in 16 bits first, by half."""
        code, kind, raw = self.code, vector(I16, 2 * self.shape.lanes), vector(I8, self.shape.bytes)
        multiply = formats.PMADDUBSW[self.shape.lanes]
        with code.loop(first, end, SHORT) as some:
            short = [[code.constant(kind, 0)] * len(sums) for _ in range(self.halves)]
            for word in (some + index for index in range(SHORT)):
                xs = [self._word(row, word, raw) for row in range(self.rows)]
                for half, added in enumerate(short):
                    weights = self._vectors(raw, self._line(word * self.halves + half))
                    for index, (row, n) in enumerate(self.numbers):
                        added[index] += code.call(multiply, kind, weights[n], xs[row])
            for half, added in enumerate(short):
                for total, value in zip(sums, added, strict=True):
                    total.set(self.fmt.dot(code, total.get(), value, code.constant(kind, 16**half)))

    def _line(self, word: Value) -> Value:
        return self.call.packed + word * (WORD * self.shape.outs)

    def _word(self, row: int, word: Value, kind: Any) -> Value:
        """A word of a row of x in all lanes."""
        place = self.call.x + (self.call.x_row * row + word * WORD)
        return self.code.load(I32, place).splat(self.shape.lanes).bits(kind)

    def _store(self, values: list[Value]) -> None:
        """Stores vectors of results."""
        call = self.call
        with self.code.if_else(call.out_size.equals(2)) as (half, full):
            for side, size in (half, 2), (full, 4):
                with side:
                    for (row, n), value in zip(self.numbers, values, strict=True):
                        stored = rounded(value) if size == 2 else value
                        place = call.result + (call.result_row * row + n * self.shape.lanes * size)
                        self.code.store(stored, place, size)

    def _scaled(self, sums: list[Value]) -> list[Value]:
        """Sums of bytes without their excess, times the scales of rows and of outputs."""
        kind, call = vector(F32, self.shape.lanes), self.call
        excess, of_rows = self._of_rows(I32, call.row_sum), self._of_rows(F32, call.row_scale)
        places = (call.out_scale + n * self.shape.bytes for n in range(self.shape.vectors))
        scales = [self.code.load(kind, place, 4) for place in places]
        return [
            (total - excess[row]).to(kind) * of_rows[row] * scales[n]
            for (row, n), total in zip(self.numbers, sums, strict=True)
        ]
