"""Products of bfloat16 pairs for many rows: x [rows, in] @ weight [out, in].T as a function of (frame, part,
parts). A part is a panel of outputs for a block of rows.

A panel of outputs is packed so that a vector has one pair of inputs of 16 outputs. A pair of a row of x is
broadcast to all lanes. So no sums need to be added up over lanes at the end, as in `multiply.py`, and the
packed inputs of a panel stay in the cache while all rows of a block are multiplied by them (Goto and van de
Geijn, 2008).
"""

from __future__ import annotations

from typing import NamedTuple

from pallas_kernels.cpu import native
from pallas_kernels.cpu.attention_blocks import transposed
from pallas_kernels.cpu.blocks import rounded
from pallas_kernels.cpu.code import Code
from pallas_kernels.cpu.formats import Processor, processor
from pallas_kernels.cpu.multiply import heights, strips
from pallas_kernels.cpu.team import PARTS
from pallas_kernels.cpu.types import F32, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.cpu.values import Value

VECTORS = 4  # of outputs
OUTS = VECTORS * LANES  # of a panel, and the minimum for a weight
LINE = 4 * OUTS  # bytes of a pair of inputs of all outputs of a panel
STEP = 2 * LANES  # inputs packed at a time, of which a weight has a multiple
DEPTH, ROWS = 768, 768  # maximum inputs that are packed at a time, and rows of a block
LEAST = 96  # rows of a block, if there are others


def why_no_panels(x: str, kind: str, outs: int, size: int) -> str | None:
    """Why the kernel cannot multiply rows of x by weights [outs, size] of this format, or None."""
    at = processor(native.host())
    if not (x == kind == "bfloat16" and at.pairs and at.lanes == LANES):
        return (
            f"{x} by {kind}: panels need bfloat16, and a processor that multiplies vectors of {LANES} pairs"
        )
    if outs < OUTS:
        return f"outputs={outs}: at least {OUTS}"
    return f"inputs={size}: must be a multiple of {STEP}" if size % STEP else None


class StripOperands(NamedTuple):
    """Arguments of a function that multiplies a strip of rows by packed inputs: addresses, and int64.

    Attributes:
        x: the first row's first packed input; x_row: bytes from one row to the next.
        packed: packed inputs; pairs: their number, in pairs.
        sums: float32 [rows, OUTS] of the inputs before.
        before, after: whether there are inputs before, and after, these.
        result: of the first row's first output; result_row: bytes from one row to the next.
        out_size: bytes of a number of the result.
    """

    x: Value
    x_row: Value
    packed: Value
    pairs: Value
    sums: Value
    before: Value
    after: Value
    result: Value
    result_row: Value
    out_size: Value


KINDS = (PTR, I64, PTR, I64, PTR, I64, I64, PTR, I64, I64)  # of StripOperands


def panels_module(target: native.Target) -> str:
    """The functions `multiply`, of x and weight, and `parts`, for what `why_no_panels` does not refuse."""
    code, at = Code(), processor(target)
    _pack(code)
    _strip(code, at)
    frame, many = code.function("parts", (PTR, I64), internal=False, result=I64)
    rows, count = _shape(code, frame)
    panels = _panels(count)
    # Two for each thread, unless blocks become so small that packing takes long.
    wanted = (many // (PARTS // 2) + (panels - 1)) // panels
    blocks = wanted.least((rows + (LEAST - 1)) // LEAST).most((rows + (ROWS - 1)) // ROWS)
    code.ret(panels * blocks)

    frame, part, parts = code.kernel("multiply")
    (x, _), (weight, shape), (result, _) = (
        code.argument(frame, 0),
        code.argument(frame, 1),
        code.result(frame, 0),
    )
    (rows, count), size = _shape(code, frame), code.word(shape, 1)
    out_size, row_bytes, blocks = code.result_size(frame, 0), size * 2, parts // _panels(count)
    most = (rows + (blocks * at.rows - 1)) // (blocks * at.rows) * at.rows  # blocks of nearly equal size
    packed, sums = code.memory(DEPTH // 2 * LINE), code.memory(ROWS * OUTS * 4)
    o = (part // blocks * OUTS).least(count - OUTS)  # the last may overlap: both compute equal results
    begin = part % blocks * most
    with code.loop(0, size, DEPTH) as first:
        depth = (size - first).least(DEPTH)
        code.call("pack", VOID, weight + (o * row_bytes + first * 2), row_bytes, depth // 2, packed)
        with strips(code, at, (rows - begin).least(most)) as (row, height):
            given = StripOperands(
                x=x + ((begin + row) * row_bytes + first * 2),
                x_row=row_bytes,
                packed=packed,
                pairs=depth // 2,
                sums=sums + row * LINE,
                before=first,
                after=size - first - depth,
                result=result + ((begin + row) * count + o) * out_size,
                result_row=count * out_size,
                out_size=out_size,
            )
            code.call("strip", VOID, *given, height)
    return code.text()


def _shape(code: Code, frame: Value) -> tuple[Value, Value]:
    """Rows and outputs of the result."""
    _, shape = code.result(frame, 0)
    return code.word(shape, 0), code.word(shape, 1)


def _panels(outs: Value) -> Value:
    return (outs + (OUTS - 1)) // OUTS


def _pack(code: Code) -> None:
    """Writes the function `pack` of a panel's weights, the bytes from one output to the next, the number of
    pairs, and the place for [pairs, OUTS] pairs.
    """
    weight, row, pairs, to = code.function("pack", (PTR, I64, I64, PTR))
    with code.loop(0, pairs, LANES) as pair, code.loop(0, VECTORS) as n:
        places = [weight + ((n * LANES + lane) * row + pair * 4) for lane in range(LANES)]
        for place in places:
            code.prefetch(place + DEPTH * 2, far=True)
        for line, turned in enumerate(transposed([code.load(vector(I32), place) for place in places])):
            code.store(turned, to + ((pair + line) * LINE + n * (4 * LANES)), 4 * LANES)


def _strip(code: Code, at: Processor) -> None:
    """Writes the function `strip` of StripOperands and the number of rows, one of `heights`."""
    for height in heights(at):
        _strip_of(code, height)
    *operands, rows = code.function("strip", (*KINDS, I64))
    with code.cases(rows) as case:
        for height in heights(at):
            with case(height):
                code.call(f"strip_{height}", VOID, *operands)


def _strip_of(code: Code, rows: int) -> None:
    given = StripOperands(*code.function(f"strip_{rows}", KINDS))
    places = [(row, n) for row in range(rows) for n in range(VECTORS)]
    sums = [code.variable(code.constant(vector(F32), 0.0)) for _ in places]

    def sum_at(row: int, n: int) -> Value:
        return given.sums + (row * LINE + n * (4 * LANES))

    with code.when(given.before > 0):
        for total, place in zip(sums, places, strict=True):
            total.set(code.load(vector(F32), sum_at(*place), 4 * LANES))
    with code.loop(0, given.pairs) as pair:
        line = given.packed + pair * LINE
        weights = [code.load(vector(F32), line + n * (4 * LANES), 4 * LANES) for n in range(VECTORS)]
        for row in range(rows):
            mine = code.load(F32, given.x + (given.x_row * row + pair * 4)).splat()
            for n, other in enumerate(weights):
                total = sums[row * VECTORS + n]
                total.set(code.pairs(mine, other, total.get()))
    with code.if_else(given.after > 0) as (more, end):
        with more:
            for total, place in zip(sums, places, strict=True):
                code.store(total.get(), sum_at(*place), 4 * LANES)
        with end, code.if_else(given.out_size.equals(2)) as (half, full):
            for side, size in (half, 2), (full, 4):
                with side:
                    for total, (row, n) in zip(sums, places, strict=True):
                        value = rounded(total.get()) if size == 2 else total.get()
                        code.store(value, given.result + (given.result_row * row + n * LANES * size), size)
