"""Products for many rows, of bfloat16 pairs or of bytes: x [rows, in] @ weight [out, in].T as functions of
(frame, part, parts). A part is a panel of outputs for a block of rows. `int4_panels.py` has four-bit weights.

Inputs are multiplied in words of 32 bits: two bfloat16, or four bytes. A panel of outputs is packed so that
a vector has one word of 16 outputs. A word of a row of x is broadcast to all lanes. So sums need not be added
up over lanes at the end, as in `multiply.py`, and the packed words of a panel stay in the cache while all
rows of a block are multiplied by them (Goto and van de Geijn, 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import rounded, transposed, zeros
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES, Format, Processor, byte_format, plain_format, processor
from pallas_kernels.llvm.kinds import INPUTS
from pallas_kernels.llvm.team import PARTS
from pallas_kernels.llvm.types import F32, I8, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value, Variable
from pallas_kernels.products.cpu.multiply import heights, quantize, strips
from pallas_kernels.quantization.formats import WeightFormat
from pallas_kernels.quantization.int4 import GROUPS

WORD, VECTOR = 4, 4 * LANES  # bytes
VECTORS = 4  # of outputs
OUTS = VECTORS * LANES  # of a panel, and the minimum for a weight
LINE = WORD * OUTS  # bytes of a word of inputs of all outputs of a panel
WORDS, ROWS = 384, 768  # maximum words that are packed at a time, and rows of a block
LEAST = 96  # rows of a block, if there are others

# Writes the packing of a panel, given the frame, the first output, the first byte of a row of x, the number
# of words, and the address of [words, OUTS] words.
Pack = Callable[[Value, Value, Value, Value, Value], None]


def serves(at: Processor, x: str, weight: WeightFormat) -> bool:
    """Whether a processor multiplies x by weights of this format in vectors of words."""
    if weight.inputs is not None:  # bytes
        able = x in INPUTS and weight.inputs == "int8" and at.bytes == "vnni"
    else:  # pairs of bfloat16
        able = x == "bfloat16" and (weight.bits == 4 or weight.numbers == x) and at.pairs
    return able and at.lanes == LANES


def why_no_panels(x: str, weight: WeightFormat, outs: int, size: int) -> str | None:
    """Why the kernel cannot multiply rows of x by weights [outs, size] of this format, or None."""
    if not serves(processor(native.host()), x, weight):
        return (
            f"{x} by {weight.name}: panels need AVX-512's products of bfloat16 pairs, for bfloat16 and int4, "
            "or of bytes, for w8a8 and w4a8"
        )
    if outs < OUTS:
        return f"outputs={outs}: at least {OUTS}"
    step = inputs_at_once(weight)
    return f"inputs={size}: must be a multiple of {step}" if size % step else None


def inputs_at_once(weight: WeightFormat) -> int:
    """A weight of this format has a multiple of this number of inputs: those of a vector, or those of the
    smallest group.
    """
    return GROUPS[0] if weight.group else VECTOR * 8 // weight.bits


class StripOperands(NamedTuple):
    """Arguments of a function that multiplies a strip of rows by packed words: addresses, and int64.

    Attributes:
        x: the first row's first packed word; x_row: bytes from one row to the next.
        packed: packed words; words: their number.
        sums: 32-bit [rows, OUTS] of the words before.
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
    """The functions `multiply`, of x and weight, and `parts`, for what `why_no_panels` does not refuse."""
    at, code = processor(target), Code()
    fmt = plain_format(at, "bfloat16", "bfloat16")
    write(code, at, fmt, _stored(code, fmt))
    return code.text()


def bytes_module(target: native.Target, x: str, hadamard: int = 1) -> str:
    """The functions `quantize`, `quantize_parts`, `multiply` and `parts`, with arguments and results as in
    `multiply.bytes_module`, to the last bit.
    """
    at, code = processor(target), Code()
    fmt = byte_format(at)
    quantize(code, at, x, 1, 2, sums=(fmt.offset, 3), transformed=(hadamard, 4))
    write(code, at, fmt, _stored(code, fmt))
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
    at = replace(at, rows=3) if group else at  # so that sums of a group and of all groups stay in registers
    _strip(code, at, fmt, group, offset)
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
    with code.loop(0, row_bytes, WORDS * WORD) as first:
        taken = (row_bytes - first).least(WORDS * WORD)
        pack(frame, o, first, taken // WORD, packed)
        with strips(code, at, (rows - begin).least(block_rows)) as (row, height):
            summed = row_sum + (begin + row) * row_sums
            call = StripOperands(
                x=x + ((begin + row) * row_bytes + first),
                x_row=row_bytes,
                packed=packed,
                words=taken // WORD,
                sums=sums + row * LINE,
                before=first,
                after=row_bytes - first - taken,
                result=result + ((begin + row) * count + o) * out_size,
                result_row=count * out_size,
                out_size=out_size,
                row_scale=row_scale + (begin + row) * 4,
                row_sum=summed + first // group * 4 if group else summed,
                out_scale=packed + WORDS * LINE if group else out_scale + o * 4,
                row_sums=row_sums,
            )
            code.call("strip", VOID, *call, height)


def _shape(code: Code, frame: Value) -> tuple[Value, Value]:
    """Rows and outputs of the result."""
    _, shape = code.result(frame, 0)
    return code.word(shape, 0), code.word(shape, 1)


def _panels(outs: Value) -> Value:
    return (outs + (OUTS - 1)) // OUTS


def _stored(code: Code, fmt: Format) -> Pack:
    """Packs weights that are stored as x is. Bytes become unsigned by their offset."""
    _pack(code, fmt)

    def pack(frame: Value, o: Value, first: Value, words: Value, to: Value) -> None:
        weight, shape = code.argument(frame, 1)
        row_bytes = code.word(shape, 1) * SIZES[fmt.x]
        code.call("pack", VOID, weight + (o * row_bytes + first), row_bytes, words, to)

    return pack


def _pack(code: Code, fmt: Format) -> None:
    """Writes the function `pack` of a panel's weights, the bytes from one output to the next, the number of
    words, and the place for [words, OUTS] words.
    """
    weight, row, words, to = code.function("pack", (PTR, I64, I64, PTR))
    flipped = code.constant(vector(I8, VECTOR), -128).bits(vector(I32))
    with code.loop(0, words, LANES) as word, code.loop(0, VECTORS) as n:
        places = [weight + ((n * LANES + lane) * row + word * WORD) for lane in range(LANES)]
        for place in places:
            code.prefetch(place + WORDS * WORD, far=True)
        lines = transposed([code.load(vector(I32), place) for place in places])
        for line, turned in enumerate(lines):
            values = turned ^ flipped if fmt.offset else turned
            code.store(values, to + ((word + line) * LINE + n * VECTOR), VECTOR)


def _strip(code: Code, at: Processor, fmt: Format, group: int | None, offset: bool) -> None:
    """Writes the function `strip` of StripOperands and the number of rows, one of `heights`."""
    for height in heights(at):
        if group:
            _strip_by_group(code, fmt, height, group, offset)
        else:
            _strip_of(code, fmt, height)
    *call, rows = code.function("strip", (*KINDS, I64))
    with code.cases(rows) as case:
        for height in heights(at):
            with case(height):
                code.call(f"strip_{height}", VOID, *call)


def _strip_of(code: Code, fmt: Format, rows: int) -> None:
    call = StripOperands(*code.function(f"strip_{rows}", KINDS))
    sums = zeros(code, fmt, rows * VECTORS)
    _resume(code, call, sums, rows)
    _add(code, fmt, call, sums, code.whole(0), call.words)
    with _end(code, call, sums, rows):
        values = [total.get() for total in sums]
        _store(code, call, _scaled(code, call, values) if fmt.offset else values)


def _strip_by_group(code: Code, fmt: Format, rows: int, group: int, offset: bool) -> None:
    call = StripOperands(*code.function(f"strip_{rows}", KINDS))
    kind, each = vector(F32), group // WORD
    of_group = zeros(code, fmt, rows * VECTORS)
    sums = [code.variable(code.constant(kind, 0.0)) for _ in of_group]
    _resume(code, call, sums, rows)
    with code.loop(0, call.words, each) as first:
        index = first // each
        of_rows = [call.row_sum + (call.row_sums * row + index * 4) for row in range(rows)]
        for n, total in enumerate(of_group):
            begin = code.constant(fmt.sums, 0) if offset else code.load(I32, of_rows[n // VECTORS], 4).splat()
            total.set(begin)
        _add(code, fmt, call, of_group, first, (first + each).least(call.words))
        lines = [call.out_scale + (index * 2 + line) * LINE for line in range(1 + offset)]
        scales, *by_sum = (
            [code.load(kind, line + n * VECTOR, VECTOR) for n in range(VECTORS)] for line in lines
        )
        for n, (total, known) in enumerate(zip(of_group, sums, strict=True)):
            row, out = divmod(n, VECTORS)
            before = known.get()
            for factor in by_sum:
                before = code.fma(factor[out], code.load(F32, of_rows[row], 4).splat(), before)
            known.set(code.fma(total.get().to(kind), scales[out], before))
    with _end(code, call, sums, rows):
        of_rows = [code.load(F32, call.row_scale + row * 4, 4).splat() for row in range(rows)]
        _store(code, call, [total.get() * of_rows[n // VECTORS] for n, total in enumerate(sums)])


def _resume(code: Code, call: StripOperands, sums: list[Variable], rows: int) -> None:
    """Loads the sums of the words before, if there are any."""
    with code.when(call.before > 0):
        for total, place in zip(sums, _places(call, rows), strict=True):
            total.set(code.load(total.kind, place, VECTOR))


@contextmanager
def _end(code: Code, call: StripOperands, sums: list[Variable], rows: int) -> Iterator[None]:
    """Stores the sums if words follow; else what is written within."""
    with code.if_else(call.after > 0) as (more, end):
        with more:
            for total, place in zip(sums, _places(call, rows), strict=True):
                code.store(total.get(), place, VECTOR)
        with end:
            yield


def _places(call: StripOperands, rows: int) -> list[Value]:
    """Addresses of vectors of sums, row by row."""
    return [call.sums + (row * LINE + n * VECTOR) for row in range(rows) for n in range(VECTORS)]


def _add(
    code: Code, fmt: Format, call: StripOperands, sums: list[Variable], first: Value, end: Value
) -> None:
    """Adds products of these words to sums, row by row."""
    with code.loop(first, end) as word:
        line = call.packed + word * LINE
        weights = [fmt.load_x(code, line + n * VECTOR) for n in range(VECTORS)]  # they are packed as x is
        for row in range(len(sums) // VECTORS):
            mine = code.load(I32, call.x + (call.x_row * row + word * WORD)).splat().bits(weights[0].kind)
            for n, other in enumerate(weights):
                total = sums[row * VECTORS + n]
                total.set(fmt.dot(code, total.get(), mine, other))


def _store(code: Code, call: StripOperands, values: list[Value]) -> None:
    """Stores vectors of results, row by row."""
    with code.if_else(call.out_size.equals(2)) as (half, full):
        for side, size in (half, 2), (full, 4):
            with side:
                for index, value in enumerate(values):
                    row, n = divmod(index, VECTORS)
                    stored = rounded(value) if size == 2 else value
                    code.store(stored, call.result + (call.result_row * row + n * LANES * size), size)


def _scaled(code: Code, call: StripOperands, sums: list[Value]) -> list[Value]:
    """Sums of bytes without their excess, times the scales of rows and of outputs."""
    scales = [code.load(vector(F32), call.out_scale + n * VECTOR, 4) for n in range(VECTORS)]
    out = []
    for index, total in enumerate(sums):
        row, n = divmod(index, VECTORS)
        excess = code.load(I32, call.row_sum + row * 4, 4).splat()
        of_row = code.load(F32, call.row_scale + row * 4, 4).splat()
        out.append((total - excess).to(vector(F32)) * of_row * scales[n])
    return out
