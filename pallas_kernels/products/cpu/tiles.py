"""Products with AMX: tiles of 16 outputs, in the layout of weights, times packed tiles of 16 rows of x.

Sums are output-major and are transposed at the end.

Linux allows a process to use tiles on request (`permitted`). Each part loads their configuration and releases
them.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from typing import NamedTuple

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import rounded, transposed
from pallas_kernels.llvm.code import Code, share
from pallas_kernels.llvm.formats import SIZES, processor
from pallas_kernels.llvm.types import F32, I8, I32, I64, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.multiply import quantize

SIDE, LINE = 16, 64  # rows of a tile, and bytes of a row
OUTS = 2 * SIDE  # outputs of a block, and the minimum for a weight
REQUEST, TILE_DATA = 0x1023, 18  # of arch_prctl: permission to use part of the registers
# palette; bytes of a row and rows of each tile
CONFIG = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])
WEIGHTS, PACKED = (4, 5), (6, 7)  # registers; sums are in the first four


@cache
def permitted() -> bool:
    """Requests permission to use the tiles. Returns whether this process has it."""
    if (
        not sys.platform.startswith("linux")
        or platform.machine() != "x86_64"
        or not processor(native.host()).tiles
    ):
        return False
    return int(ctypes.CDLL(None).syscall(158, REQUEST, TILE_DATA)) == 0


def packed_bytes(rows: int, size: int, x: str) -> int:
    return -(-rows // SIDE) * -(-size * SIZES[x] // LINE) * SIDE * LINE


class TileOperands(NamedTuple):
    """Arguments of a function that multiplies a block: addresses, and int64.

    Attributes:
        packed: blocks of packed rows; strip: bytes of each.
        row_bytes: of a weight; result_row: of the result.
        rows: number of rows, at most that of the blocks.
        row_scale, out_scale: scales of rows and of outputs, for bytes.
        out_size: bytes of a number of the result.
        ahead: prefetch distance for weights in bytes; 0: none.
    """

    packed: Value
    strip: Value
    weight: Value
    row_bytes: Value
    result: Value
    result_row: Value
    rows: Value
    row_scale: Value
    out_scale: Value
    out_size: Value
    ahead: Value


KINDS = (PTR, I64, PTR, I64, PTR, I64, I64, PTR, PTR, I64, I64)  # of Operands


def tiles_module(target: native.Target, x: str, *, of_bytes: bool, hadamard: int = 1) -> str:
    """Functions `quantize` (for bytes), `pack` and `multiply`.

    Arguments: x, weight and, for bytes, the weight's scale. Results: out, packed rows and, for bytes, their
    bytes and scales; with a hadamard block above 1, also x transformed, float32.
    """
    code = Code()
    if of_bytes:
        quantize(code, processor(target), x, 2, 3, transformed=(hadamard, 4))
    _pack(code, SIZES["int8" if of_bytes else "bfloat16"], of_bytes)
    _multiply(code, of_bytes)
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
                code.store(words, into + (unit * (SIDE * LINE) + n * LINE))

        with code.if_else(row_bytes - start < LINE) as (partial, whole):
            with partial:
                for line, padded in zip(lines, rest, strict=True):
                    code.store(code.constant(vector(I8, LINE), 0), padded)
                    code.call("memcpy", PTR, padded, line, row_bytes - start)
                pack(rest)
            with whole:
                pack(lines)


def _multiply(code: Code, of_bytes: bool) -> None:
    item = 1 if of_bytes else 2
    for blocks in (1, 2):
        _block(code, f"block_{blocks}", blocks, of_bytes)
    frame, part, parts = code.kernel("multiply")
    (weight, shape), (packed, _) = code.argument(frame, 1), code.result(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, (count, size) = code.word(result_shape, 0), (code.word(shape, index) for index in (0, 1))
    out_scale, row_scale = (
        (code.argument(frame, 2)[0], code.result(frame, 3)[0]) if of_bytes else (weight, weight)
    )
    row_bytes, out_size = size * item, code.result_size(frame, 0)
    result_row, strip = count * out_size, (row_bytes + (LINE - 1)) // LINE * (SIDE * LINE)
    code.call("llvm.x86.ldtilecfg", VOID, code.data("config", CONFIG))
    with (
        code.loop(*share((count + (OUTS - 1)) // OUTS, part, parts)) as unit,
        code.loop(0, rows, 2 * SIDE) as row,
    ):
        o = (unit * OUTS).least(count - OUTS)  # the last may overlap: both compute equal results
        call = TileOperands(
            packed=packed + row // SIDE * strip,
            strip=strip,
            weight=weight + o * row_bytes,
            row_bytes=row_bytes,
            result=result + (row * count + o) * out_size,
            result_row=result_row,
            rows=(rows - row).least(2 * SIDE),
            row_scale=row_scale + row * 4,
            out_scale=out_scale + o * 4,
            out_size=out_size,
            ahead=row.equals(0).choose(row_bytes * OUTS, 0),
        )
        with code.if_else(call.rows > SIDE) as (two, single):
            with two:
                code.call("block_2", VOID, *call)
            with single:
                code.call("block_1", VOID, *call)
    code.call("llvm.x86.tilerelease", VOID)


def _block(code: Code, name: str, blocks: int, of_bytes: bool) -> None:
    """Writes a function with this name and Operands, which multiplies OUTS outputs by one or two blocks of
    rows.
    """
    call = TileOperands(*code.function(name, KINDS))
    whole = call.row_bytes.rounded_down(LINE)
    rest = call.row_bytes - whole
    # register, half of the outputs, block
    sums = [(2 * n + block, n, block) for n in range(2) for block in range(blocks)]

    def instruction(name: str, *operands: Value | int) -> None:
        """An instruction for tiles. Python integers are registers."""
        operands = tuple(code.constant(I8, each) if isinstance(each, int) else each for each in operands)
        code.call(f"llvm.x86.{name}", VOID, *operands)

    def multiply(chunk: Value, weights: Value, stride: Value) -> None:
        for n in range(2):
            instruction("tileloadd64", WEIGHTS[n], weights + stride * (n * SIDE), stride)
        for block in range(blocks):
            place = call.packed + (call.strip * block + chunk * SIDE)
            instruction("tileloadd64", PACKED[block], place, code.whole(LINE))
        for register, n, block in sums:
            instruction("tdpbssd" if of_bytes else "tdpbf16ps", register, WEIGHTS[n], PACKED[block])

    for register, _, _ in sums:
        instruction("tilezero", register)
    with code.loop(0, whole, LINE) as chunk:
        here = call.weight + chunk
        with code.when(call.ahead > 0):
            for n in range(OUTS):
                code.prefetch(here + (call.ahead + call.row_bytes * n))
        multiply(chunk, here, call.row_bytes)
    with code.when(rest > 0):
        tail = code.memory(OUTS * LINE)
        with code.loop(0, OUTS) as row:
            line = tail + row * LINE
            code.store(code.constant(vector(I8, LINE), 0), line)
            code.call("memcpy", PTR, line, call.weight + (row * call.row_bytes + whole), rest)
        multiply(whole, tail, code.whole(LINE))

    tile = code.memory(SIDE * LINE)
    for register, n, block in sums:
        instruction("tilestored64", register, tile, code.whole(LINE))
        sides = [
            code.load(vector(I32 if of_bytes else F32, SIDE), tile + line * LINE) for line in range(SIDE)
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
