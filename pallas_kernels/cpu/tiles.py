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
from typing import Any

from llvmlite import ir

from pallas_kernels.cpu import native
from pallas_kernels.cpu.blocks import rounded
from pallas_kernels.cpu.emit import F32, I8, I32, I64, PTR, VOID, Code, constant, vector
from pallas_kernels.cpu.formats import SIZES, processor
from pallas_kernels.cpu.multiply import quantize

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
    return str(code.module)


def _pack(code: Code, item: int, of_bytes: bool) -> None:
    """Packs rows [rows, in] into [blocks, chunks, 16 four-byte words, 16 rows], padded with zeros."""
    frame, part, parts = code.function("pack", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    source, shape = code.argument(frame, 0)
    if of_bytes:
        source, _ = code.result(frame, 2)
    into, _ = code.result(frame, 1)
    rows, row_bytes = code.word(shape, 0), code.mul(code.word(shape, 1), item)
    chunks = b.sdiv(code.add(row_bytes, LINE - 1), I64(LINE))
    blocks = b.sdiv(code.add(rows, SIDE - 1), I64(SIDE))
    line, zero = code.buffer(vector(I8, LINE)), constant(vector(I8, LINE), 0)
    units = code.mul(blocks, chunks)
    first, end = (b.sdiv(code.mul(units, n), parts) for n in (part, code.add(part, 1)))
    lines = [code.buffer(vector(I8, LINE)) for _ in range(SIDE)]
    with code.loop(first, end, 1) as unit:
        block, chunk = b.sdiv(unit.index, chunks), b.srem(unit.index, chunks)
        start = code.mul(chunk, LINE)
        count = code.least(b.sub(row_bytes, start), LINE)
        for n, line in enumerate(lines):
            row = code.add(code.mul(block, SIDE), n)
            code.store(zero, line)
            with b.if_then(b.icmp_signed("<", row, rows)):
                code.call(
                    "memcpy", PTR, line, code.at(source, code.add(code.mul(row, row_bytes), start)), count
                )
        turned = transposed(code, [code.load(line, vector(I32, SIDE)) for line in lines])
        for n, words in enumerate(turned):
            code.store(words, code.at(into, code.add(code.mul(unit.index, SIDE * LINE), n * LINE)))
    b.ret_void()


def _multiply(code: Code, of_bytes: bool) -> None:
    item = 1 if of_bytes else 2
    config = ir.GlobalVariable(code.module, vector(I8, LINE), "config")
    config.initializer, config.linkage, config.global_constant, config.align = (
        ir.Constant(vector(I8, LINE), list(CONFIG)),
        "internal",
        True,
        64,
    )
    for blocks in (1, 2):
        _block(code, f"block_{blocks}", blocks, of_bytes)
    frame, part, parts = code.function("multiply", [I64] * 3, internal=False)
    b, frame = code.b, code.b.inttoptr(frame, PTR)
    (weight, shape), (packed, _) = code.argument(frame, 1), code.result(frame, 1)
    result, result_shape = code.result(frame, 0)
    rows, (count, size) = code.word(result_shape, 0), (code.word(shape, index) for index in (0, 1))
    out_scale, row_scale = (
        (code.argument(frame, 2)[0], code.result(frame, 3)[0]) if of_bytes else (weight, weight)
    )
    row_bytes, out_size = code.mul(size, item), code.result_size(frame, 0)
    # bytes of a block of packed rows
    strip = code.mul(b.sdiv(code.add(row_bytes, LINE - 1), I64(LINE)), SIDE * LINE)
    units = b.sdiv(code.add(count, OUTS - 1), I64(OUTS))
    first, end = (b.sdiv(code.mul(units, n), parts) for n in (part, code.add(part, 1)))
    code.call("llvm.x86.ldtilecfg", VOID, config.bitcast(PTR))
    with code.loop(first, end, 1) as unit, code.loop(0, rows, 2 * SIDE) as pair:
        # the last may overlap: both compute equal results
        o = code.least(code.mul(unit.index, OUTS), b.sub(count, I64(OUTS)))
        ahead = b.select(b.icmp_signed("==", pair.index, I64(0)), code.mul(row_bytes, OUTS), I64(0))
        args = [
            code.at(packed, code.mul(b.sdiv(pair.index, I64(SIDE)), strip)),
            strip,
            code.at(weight, code.mul(o, row_bytes)),
            row_bytes,
            code.at(result, code.mul(code.add(code.mul(pair.index, count), o), out_size)),
            code.mul(count, out_size),
            code.least(b.sub(rows, pair.index), 2 * SIDE),
            code.at(row_scale, code.mul(pair.index, 4)),
            code.at(out_scale, code.mul(o, 4)),
            out_size,
            ahead,
        ]
        with b.if_else(b.icmp_signed(">", args[6], I64(SIDE))) as (two, one):
            with two:
                code.call("block_2", VOID, *args)
            with one:
                code.call("block_1", VOID, *args)
    code.call("llvm.x86.tilerelease", VOID)
    b.ret_void()


def _block(code: Code, name: str, blocks: int, of_bytes: bool) -> None:
    """Multiplies 32 outputs by one or two blocks of rows."""
    kinds = (PTR, I64, PTR, I64, PTR, I64, I64, PTR, PTR, I64, I64)
    packed, strip, weight, row_bytes, result, result_row, rows, row_scale, out_scale, out_size, ahead = (
        code.function(name, kinds)
    )
    b, whole = code.b, code.b.and_(row_bytes, I64(-LINE))
    rest = b.sub(row_bytes, whole)
    dot = "llvm.x86.tdpbssd" if of_bytes else "llvm.x86.tdpbf16ps"
    # register, half of the outputs, block
    sums = [(2 * n + block, n, block) for n in range(2) for block in range(blocks)]

    def multiplied(chunk: Any, weights: Any, stride: Any) -> None:
        for n in range(2):
            code.call(
                "llvm.x86.tileloadd64",
                VOID,
                I8(WEIGHTS[n]),
                code.at(weights, code.mul(stride, n * SIDE)),
                stride,
            )
        for block in range(blocks):
            place = code.at(packed, code.add(code.mul(strip, block), code.mul(chunk, SIDE)))
            code.call("llvm.x86.tileloadd64", VOID, I8(PACKED[block]), place, I64(LINE))
        for register, n, block in sums:
            code.call(dot, VOID, I8(register), I8(WEIGHTS[n]), I8(PACKED[block]))

    for register, _, _ in sums:
        code.call("llvm.x86.tilezero", VOID, I8(register))
    with code.loop(0, whole, LINE) as chunks:
        here = code.at(weight, chunks.index)
        with b.if_then(b.icmp_signed("!=", ahead, I64(0))):
            for n in range(OUTS):
                code.fetch(code.at(here, code.add(ahead, code.mul(row_bytes, n))))
        multiplied(chunks.index, here, row_bytes)
    with b.if_then(b.icmp_signed("!=", rest, I64(0))):
        tail = code.buffer(vector(I8, OUTS * LINE))
        with code.loop(0, OUTS, 1) as row:
            line = code.at(tail, code.mul(row.index, LINE))
            code.store(constant(vector(I8, LINE), 0), line)
            code.call(
                "memcpy", PTR, line, code.at(weight, code.add(code.mul(row.index, row_bytes), whole)), rest
            )
        multiplied(whole, tail, I64(LINE))

    kind = vector(I32 if of_bytes else F32, SIDE)
    tile = code.buffer(vector(I8, SIDE * LINE))
    for register, n, block in sums:
        code.call("llvm.x86.tilestored64", VOID, I8(register), tile, I64(LINE))
        sides = [code.load(code.at(tile, n * LINE), kind) for n in range(SIDE)]
        for place_in_block, values in enumerate(transposed(code, sides)):
            own = I64(block * SIDE + place_in_block)
            with b.if_then(b.icmp_signed("<", own, rows)):
                if of_bytes:
                    scale = code.splat(code.load(code.at(row_scale, code.mul(own, 4)), F32, 4), SIDE)
                    values = b.fmul(b.sitofp(values, vector(F32, SIDE)), scale)
                    values = b.fmul(values, code.load(code.at(out_scale, 4 * SIDE * n), vector(F32, SIDE), 4))
                place = code.at(result, code.add(code.mul(own, result_row), code.mul(out_size, SIDE * n)))
                with b.if_else(b.icmp_signed("==", out_size, I64(2))) as (half, full):
                    with half:
                        code.store(rounded(code, values), place, 2)
                    with full:
                        code.store(values, place, 4)
    b.ret_void()


def transposed(code: Code, lines: list[Any]) -> list[Any]:
    """Transposes vectors, as many as each has lanes, a power of two."""
    count, half = len(lines), 1
    while half < count:
        low = [n % (2 * half) // half * count + n // (2 * half) * 2 * half + n % half for n in range(count)]
        made = list(lines)
        for n in range(count):
            if n // half % 2 == 0:
                one, other = lines[n], lines[n + half]
                made[n] = code.shuffle(one, other, low)
                made[n + half] = code.shuffle(one, other, [place + half for place in low])
        lines, half = made, 2 * half
    return lines
