"""Products with AMX: tiles of 16 outputs, in the layout of weights, times packed tiles of 16 rows of x.
Four-bit weights become bfloat16, some tiles at a time.

Sums are output-major and are transposed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pallas_kernels.llvm import amx, native
from pallas_kernels.llvm.amx import LINE, SIDE, TILE
from pallas_kernels.llvm.blocks import rounded, transposed
from pallas_kernels.llvm.code import Code, share
from pallas_kernels.llvm.formats import SIZES, Processor, plain_format, processor
from pallas_kernels.llvm.types import F32, I8, I32, I64, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu import int4
from pallas_kernels.products.cpu.multiply import quantize

OUTS = 2 * SIDE  # outputs of a block, and the minimum for a weight
CHUNKS, ROWS = 16, 256  # maximum tiles of inputs unpacked at a time, and rows that are multiplied by them
CHUNK = LINE // 2  # inputs of a tile, bfloat16
WEIGHTS, PACKED = (4, 5), (6, 7)  # registers; sums are in the first four


def packed_bytes(rows: int, size: int, x: str) -> int:
    return -(-rows // SIDE) * -(-size * SIZES[x] // LINE) * TILE


class TileOperands(NamedTuple):
    """Arguments of a function that multiplies a block: addresses, and int64.

    Attributes:
        packed: tiles of two blocks of rows; strip: bytes of a block's.
        weight: of the first output; row_bytes: from one output to the next.
        chunks: number of tiles.
        sums: four tiles: those of the chunks before.
        before, after: whether there are chunks before, and after, these.
        result: of the first row; result_row: bytes from one row to the next.
        rows: number of rows, at most that of the blocks.
        row_scale, out_scale: scales of rows and of outputs, for bytes.
        out_size: bytes of a number of the result.
        ahead: prefetch distance for weights in bytes.
        first_ahead, end_ahead: the outputs whose weights are prefetched.
    """

    packed: Value
    strip: Value
    weight: Value
    row_bytes: Value
    chunks: Value
    sums: Value
    before: Value
    after: Value
    result: Value
    result_row: Value
    rows: Value
    row_scale: Value
    out_scale: Value
    out_size: Value
    ahead: Value
    first_ahead: Value
    end_ahead: Value


KINDS = (PTR, I64, PTR, I64, I64, PTR, I64, I64, PTR, I64, I64, PTR, PTR, *[I64] * 4)  # of TileOperands


class Weights(NamedTuple):
    """OUTS outputs of some chunks.

    Attributes:
        place, row_bytes: of the first output, and from one output to the next.
        chunks: their number.
        ahead: prefetch distance in bytes; 0: none.
    """

    place: Value
    row_bytes: Value
    chunks: Value
    ahead: Value


# Given the frame, the first output and the first chunk, writes what provides their weights.
Provide = Callable[[Value, Value, Value], Weights]


def tiles_module(target: native.Target, x: str, of_bytes: bool, hadamard: int = 1) -> str:
    """Functions `quantize` (for bytes), `pack` and `multiply`.

    Arguments: x, weight and, for bytes, the weight's scale. Results: out, packed rows and, for bytes, their
    bytes and scales; with a hadamard block above 1, also x transformed, float32.
    """
    code = Code()
    if of_bytes:
        quantize(code, processor(target), x, 2, 3, transformed=(hadamard, 4))
    item = SIZES["int8" if of_bytes else "bfloat16"]
    _pack(code, item, of_bytes)
    _multiply(code, item, LINE, _in_place(code, item), of_bytes)
    return code.text()


def int4_tiles_module(target: native.Target, group: int, offset: bool, kind: str) -> str:
    """Functions `pack` and `multiply` of bfloat16 x, values, scale and, if weights have offsets, offset.

    Results: out and packed rows.
    """
    code = Code()
    _pack(code, SIZES["bfloat16"], False)
    weights = _unpacked(code, processor(target), group, offset, kind)
    _multiply(code, SIZES["bfloat16"], OUTS * LINE, weights)
    return code.text()


def _pack(code: Code, item: int, of_bytes: bool) -> None:
    """Packs rows [rows, in] into [blocks, chunks, 16 four-byte words, 16 rows], padded with zeros."""
    frame, part, parts = code.kernel("pack")
    source, shape = code.argument(frame, 0)
    if of_bytes:
        source, _ = code.result(frame, 2)
    into, _ = code.result(frame, 1)
    rows, row_bytes = code.word(shape, 0), code.word(shape, 1) * item
    chunks = (row_bytes + (LINE - 1)) // LINE
    blocks = (rows + (SIDE - 1)) // SIDE
    rest = [code.memory(LINE) for _ in range(SIDE)]
    with code.loop(*share(blocks * chunks, part, parts)) as unit:
        block, start = unit // chunks, unit % chunks * LINE
        # rows beyond the last are copies of it, and their sums are not stored
        lines = [source + ((block * SIDE + n).least(rows - 1) * row_bytes + start) for n in range(SIDE)]

        def pack(lines: list[Value]) -> None:
            for n, words in enumerate(transposed([code.load(vector(I32, SIDE), line) for line in lines])):
                code.store(words, into + (unit * TILE + n * LINE))

        with code.if_else(row_bytes - start < LINE) as (partial, whole):
            with partial:
                for line, padded in zip(lines, rest, strict=True):
                    code.store(code.constant(vector(I8, LINE), 0), padded)
                    code.call("memcpy", PTR, padded, line, row_bytes - start)
                pack(rest)
            with whole:
                pack(lines)


def _multiply(code: Code, item: int, step: int, provide: Provide, of_bytes: bool = False) -> None:
    """step: bytes from one chunk of an output to the next."""
    for blocks in (1, 2):
        _block(code, f"block_{blocks}", blocks, step, of_bytes)
    frame, part, parts = code.kernel("multiply")
    (_, shape), (packed, _) = code.argument(frame, 0), code.result(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, count = (code.word(result_shape, index) for index in (0, 1))
    out_scale, row_scale = (
        (code.argument(frame, 2)[0], code.result(frame, 3)[0]) if of_bytes else (packed, packed)
    )
    out_size, chunks = code.result_size(frame, 0), (code.word(shape, 1) * item + (LINE - 1)) // LINE
    sums = code.memory(ROWS * OUTS * 4)
    with (
        amx.configured(code),
        code.loop(*share((count + (OUTS - 1)) // OUTS, part, parts)) as unit,
        code.loop(0, rows, ROWS) as begin,
    ):
        o = (unit * OUTS).least(count - OUTS)  # the last may overlap: both compute equal results
        at = code.variable(code.whole(0))
        with code.repeat(lambda: at.get() < chunks):
            first = at.get()
            weights = provide(frame, o, first)
            at.set(first + weights.chunks)
            whole = weights.chunks.equals(chunks)  # sums are used at once, so they stay in the same place
            # each block of rows prefetches its share of the next weights: all at once would wait for memory
            turns = (rows + (2 * SIDE - 1)) // (2 * SIDE)
            prefetched = (weights.ahead > 0).choose(code.whole(OUTS), code.whole(0))
            with code.loop(begin, (begin + ROWS).least(rows), 2 * SIDE) as row:
                turn = row // (2 * SIDE)
                call = TileOperands(
                    packed=packed + (row // SIDE * chunks + first) * TILE,
                    strip=chunks * TILE,
                    weight=weights.place,
                    row_bytes=weights.row_bytes,
                    chunks=weights.chunks,
                    sums=sums + whole.choose(code.whole(0), (row - begin) * (OUTS * 4)),
                    before=first,
                    after=chunks - at.get(),
                    result=result + (row * count + o) * out_size,
                    result_row=count * out_size,
                    rows=(rows - row).least(2 * SIDE),
                    row_scale=row_scale + row * 4,
                    out_scale=out_scale + o * 4,
                    out_size=out_size,
                    ahead=weights.ahead,
                    first_ahead=prefetched * turn // turns,
                    end_ahead=prefetched * (turn + 1) // turns,
                )
                with code.if_else(call.rows > SIDE) as (two, single):
                    with two:
                        code.call("block_2", VOID, *call)
                    with single:
                        code.call("block_1", VOID, *call)


def _in_place(code: Code, item: int) -> Provide:
    """Weights that are stored as they are multiplied, numbers of `item` bytes: first all whole chunks, then
    what is left of a row.
    """

    def provide(frame: Value, o: Value, first: Value) -> Weights:
        weight, shape = code.argument(frame, 1)
        row_bytes, tail = code.word(shape, 1) * item, code.memory(OUTS * LINE)
        whole, begin = row_bytes // LINE, weight + o * row_bytes
        in_place = first < whole
        with code.when(first >= whole), code.loop(0, OUTS) as n:
            rest, line = whole * LINE, tail + n * LINE
            code.store(code.constant(vector(I8, LINE), 0), line, LINE)
            code.call("memcpy", PTR, line, begin + (n * row_bytes + rest), row_bytes - rest)
        return Weights(
            in_place.choose(begin, tail),
            in_place.choose(row_bytes, code.whole(LINE)),
            in_place.choose(whole, code.whole(1)),
            in_place.choose(row_bytes * OUTS, code.whole(0)),
        )

    return provide


def _unpacked(code: Code, at: Processor, group: int, offset: bool, kind: str) -> Provide:
    """Four-bit weights as bfloat16."""
    fmt = int4.Int4Format(at, plain_format(at, "bfloat16", "bfloat16"), group, offset, kind)
    *packed, to = code.function("unpack", (*int4.KINDS, PTR))
    weight = int4.Packed(*packed)
    with code.loop(0, OUTS) as n, code.loop(0, int4.tiles_of(weight.size)) as tile:
        for step, values in enumerate(int4.weights_of(code, fmt, weight.at(n), tile)):
            code.store(values, to + ((tile * int4.STEPS + step) * OUTS + n) * LINE, LINE)

    def provide(frame: Value, o: Value, first: Value) -> Weights:
        size, place = code.word(code.argument(frame, 0)[1], 1), code.memory(CHUNKS * OUTS * LINE)
        chunks = ((size + (CHUNK - 1)) // CHUNK - first).least(CHUNKS)
        weight = int4.packed_of(code, frame, offset, chunks * CHUNK)
        code.call("unpack", VOID, *weight.at(o).after(first * CHUNK, group), place)
        return Weights(place, code.whole(LINE), chunks, code.whole(0))

    return provide


def _block(code: Code, name: str, blocks: int, step: int, of_bytes: bool) -> None:
    """Writes a function with this name and TileOperands, which multiplies OUTS outputs by one or two blocks
    of rows.
    """
    call = TileOperands(*code.function(name, KINDS))
    # register, half of the outputs, block
    sums = [(2 * n + block, n, block) for n in range(2) for block in range(blocks)]
    line, instruction = code.whole(LINE), partial(amx.instruction, code)
    for register, *_ in sums:
        instruction("tilezero", register)
    with code.when(call.before > 0):
        for register, *_ in sums:
            instruction("tileloadd64", register, call.sums + register * TILE, line)
    with code.loop(0, call.chunks) as chunk:
        here = call.weight + chunk * step
        with code.loop(call.first_ahead, call.end_ahead) as out:
            code.prefetch(here + (call.ahead + call.row_bytes * out), far=True)
        for n in range(2):
            instruction("tileloadd64", WEIGHTS[n], here + call.row_bytes * (n * SIDE), call.row_bytes)
        for block in range(blocks):
            place = call.packed + (call.strip * block + chunk * TILE)
            instruction("tileloadd64", PACKED[block], place, line)
        for register, n, block in sums:
            instruction("tdpbssd" if of_bytes else "tdpbf16ps", register, WEIGHTS[n], PACKED[block])
    for register, *_ in sums:
        instruction("tilestored64", register, call.sums + register * TILE, line)
    with code.when(call.after.equals(0)):
        for register, n, block in sums:
            sides = [
                code.load(vector(I32 if of_bytes else F32, SIDE), call.sums + (register * TILE + side * LINE))
                for side in range(SIDE)
            ]
            for index, values in enumerate(transposed(sides), block * SIDE):
                with code.when(call.rows > index):
                    _store(code, call, index, n, values, of_bytes)


def _store(code: Code, call: TileOperands, row: int, half: int, values: Value, of_bytes: bool) -> None:
    """Stores a row's sums for one half of the outputs."""
    if of_bytes:
        values = values.to(vector(F32, SIDE)) * code.load(F32, call.row_scale + row * 4, 4).splat(SIDE)
        values = values * code.load(vector(F32, SIDE), call.out_scale + 4 * SIDE * half, 4)
    place = call.result + (call.result_row * row + call.out_size * (SIDE * half))
    with code.if_else(call.out_size.equals(2)) as (short, full):
        with short:
            code.store(rounded(values), place, 2)
        with full:
            code.store(values, place, 4)
