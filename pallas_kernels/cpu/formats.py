"""How a processor multiplies two rows of numbers, vector by vector: the instructions and their operands.

A pair of rows is summed in the lanes of one vector in storage order, whatever block the pair belongs to. So a
sum is bit-identical for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm

from pallas_kernels.cpu.emit import BF16, F32, HALF, I8, I16, I32, Code, constant, vector
from pallas_kernels.cpu.native import Target

SIZES = {"bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}  # bytes of a number


@dataclass(frozen=True)
class Processor:
    """Capabilities of a target.

    Attributes:
        lanes: float32 numbers in a vector.
        pairs: products of bfloat16 pairs into float32.
        bytes: instructions for eight-bit numbers: vnni (unsigned times signed), sdot, or widening ("madd":
            x86's for 16 bits).
        halves: conversion from float16 to float32 in one instruction.
        tiles: AMX, for bfloat16 pairs and bytes.
        rows, outs: size of a block whose sums stay in registers.
    """

    lanes: int
    pairs: bool
    bytes: str
    halves: bool
    rows: int
    outs: int
    tiles: bool = False


def processor(target: Target) -> Processor:
    has = {name[1:] for name in target.features.split(",") if name.startswith("+")}
    if target.architecture == "x86":
        wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has
        narrow = {"avx2", "fma", "f16c"} <= has
        vnni = "avx512vnni" in has if wide else "avxvnni" in has
        return Processor(
            lanes=16 if wide else 8 if narrow else 4,
            pairs=wide and "avx512bf16" in has,
            bytes="vnni" if vnni and (wide or narrow) else "madd" if wide or narrow else "widened",
            halves=wide or narrow,
            rows=6 if wide else 2,
            outs=4,
            tiles=wide and {"amx-tile", "amx-bf16", "amx-int8"} <= has,
        )
    if target.architecture == "aarch64":
        return Processor(
            lanes=4,
            pairs="bf16" in has,
            bytes="sdot" if "dotprod" in has else "widened",
            halves=True,
            rows=4,
            outs=4,
        )
    return Processor(lanes=4, pairs=False, bytes="widened", halves=False, rows=2, outs=2)


@dataclass(frozen=True)
class Format:
    """How rows of x are multiplied by rows of weights.

    Attributes:
        x, weight: dtypes of the stored numbers.
        step: numbers in a vector.
        sums: type of the vector of sums, initially zero.
        load_x, load_weight: (code, address) -> operand.
        dot: (code, sums, x, weight) -> sums.
        factor: the factor by which sums are too small.
        offset: added to weights when they are loaded; sums are thus too large by this times the sum of x.
    """

    x: str
    weight: str
    step: int
    sums: Any
    load_x: Callable[[Code, Any], Any]
    load_weight: Callable[[Code, Any], Any]
    dot: Callable[[Code, Any, Any, Any], Any]
    factor: float = 1.0
    offset: int = 0


def plain_format(at: Processor, x: str, weight: str) -> Format:
    """Float x, bfloat16 or float32, times weights of any dtype."""
    factor = 256.0 if weight == "float8_e4m3fn" else 1.0
    if x == "bfloat16" and at.pairs and weight != "float32":
        step = 2 * at.lanes

        def load(dtype: str) -> Callable[[Code, Any], Any]:
            return lambda code, place: _pairs(code, at, place, dtype, step)

        return Format(x, weight, step, vector(F32, at.lanes), load(x), load(weight), _dot_pairs, factor)

    def floats(dtype: str) -> Callable[[Code, Any], Any]:
        return lambda code, place: as_floats(code, at, place, dtype, at.lanes)

    return Format(x, weight, at.lanes, vector(F32, at.lanes), floats(x), floats(weight), _dot_floats, factor)


def byte_format(at: Processor) -> Format:
    """Bytes times bytes."""
    sums = vector(I32, at.lanes)
    step = {"madd": at.lanes * 2, "widened": at.lanes}.get(at.bytes, at.lanes * 4)

    def raw(code: Code, place: Any) -> Any:
        return code.load(place, vector(I8, step))

    def wide(code: Code, place: Any) -> Any:
        return code.b.sext(raw(code, place), vector(I16 if at.bytes == "madd" else I32, step))

    def unsigned(code: Code, place: Any) -> Any:
        weight = raw(code, place)
        return code.b.xor(weight, constant(weight.type, -128))

    if at.bytes == "vnni":  # multiplies unsigned by signed bytes
        return Format("int8", "int8", step, sums, raw, unsigned, _dot_vnni, offset=128)
    load = raw if at.bytes == "sdot" else wide
    dot = {"sdot": _dot_sdot, "madd": _dot_madd, "widened": _dot_widened}[at.bytes]
    return Format("int8", "int8", step, sums, load, load, dot)


def as_floats(code: Code, at: Processor, place: Any, dtype: str, count: int) -> Any:
    """Converts stored numbers to float32; those of e4m3 are divided by 256."""
    b = code.b
    if dtype == "float32":
        return code.load(place, vector(F32, count))
    if dtype == "bfloat16":
        bits = b.zext(code.load(place, vector(I16, count)), vector(I32, count))
        return b.bitcast(b.shl(bits, constant(bits.type, 16)), vector(F32, count))
    stored = code.load(place, vector(I8, count))
    if dtype == "int8":
        return b.sitofp(stored, vector(F32, count))
    short = b.sext(stored, vector(I16, count))
    if at.halves:  # the bits of a float16 with a different exponent bias
        bits = b.and_(b.shl(short, constant(short.type, 7)), constant(short.type, 0xBFFF - 0x10000))
        return b.fpext(b.bitcast(bits, vector(HALF, count)), vector(F32, count))
    wide = b.sext(stored, vector(I32, count))
    size = b.shl(b.and_(wide, constant(wide.type, 0x7F)), constant(wide.type, 20))
    usual = b.add(size, constant(wide.type, 112 << 23))
    # the smallest normal number, which the next exponent adds to a subnormal one
    one = constant(vector(F32, count), 2.0**-14)
    small = b.fsub(b.bitcast(b.or_(size, constant(wide.type, 113 << 23)), one.type), one)
    subnormal = b.icmp_unsigned("<", size, constant(wide.type, 1 << 23))
    bits = b.select(subnormal, b.bitcast(small, wide.type), usual)
    return b.bitcast(b.or_(bits, b.and_(wide, constant(wide.type, -(1 << 31)))), vector(F32, count))


def _pairs(code: Code, at: Processor, place: Any, dtype: str, step: int) -> Any:
    """Loads bfloat16."""
    if dtype == "bfloat16":
        return code.load(place, vector(BF16, step))
    low, high = (
        as_floats(code, at, code.at(place, part * SIZES[dtype] * step // 2), dtype, step // 2)
        for part in (0, 1)
    )
    return as_pairs(code, low, high)


def as_pairs(code: Code, low: Any, high: Any) -> Any:
    """Combines two vectors of float32 that are bfloat16 numbers into one of bfloat16."""
    count = 2 * low.type.count
    low, high = (code.b.bitcast(part, vector(I16, count)) for part in (low, high))
    upper = [2 * n + 1 for n in range(count)]  # upper half of each number
    return code.b.bitcast(code.shuffle(low, high, upper), vector(BF16, count))


def _dot_pairs(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    name = (
        "llvm.x86.avx512bf16.dpbf16ps.512"
        if sums.type.count == 16
        else "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
    )
    return code.call(name, sums.type, sums, x, weight)


def _dot_floats(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    return code.call(f"llvm.fmuladd.v{sums.type.count}f32", sums.type, x, weight, sums)


def _dot_vnni(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}"
    if llvm.llvm_version_info[0] < 22:  # older versions take words of four numbers
        x, weight = (code.b.bitcast(side, sums.type) for side in (x, weight))
    return code.call(name, sums.type, sums, weight, x)


def _dot_sdot(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    return code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, x, weight)


def _dot_madd(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    name = "llvm.x86.avx512.pmaddw.d.512" if sums.type.count == 16 else "llvm.x86.avx2.pmadd.wd"
    return code.b.add(sums, code.call(name, sums.type, x, weight))


def _dot_widened(code: Code, sums: Any, x: Any, weight: Any) -> Any:
    return code.b.add(sums, code.b.mul(x, weight))
