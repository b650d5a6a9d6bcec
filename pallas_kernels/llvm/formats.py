"""How a processor multiplies two rows of numbers, vector by vector: the instructions and their operands.

A pair of rows is summed in the lanes of one vector in storage order, whatever block the pair belongs to. So a
sum is bit-identical for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm

from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.native import Target
from pallas_kernels.llvm.types import BF16, F16, F32, I8, I16, I32, vector
from pallas_kernels.llvm.values import Value

# by lanes: unsigned times signed bytes, in sums of two of 16 bits
PMADDUBSW = {8: "llvm.x86.avx2.pmadd.ub.sw", 16: "llvm.x86.avx512.pmaddubs.w.512"}
MADD = {8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}  # of 16 bits, sums of two
SIZES = {"bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1}  # bytes of a number


@dataclass(frozen=True)
class Processor:
    """Capabilities of a target.

    Attributes:
        lanes: float32 numbers in a vector.
        pairs: products of bfloat16 pairs into float32.
        fast_pairs: these are faster than products of float32. On Intel's processors they are slower, and
            save conversions.
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
    fast_pairs: bool = False
    tiles: bool = False

    def for_floats(self) -> Processor:
        """With AVX2's 16 registers, sums of floats leave place for a further row; those of bytes do not."""
        return replace(self, rows=3) if self.lanes == 8 else self


def processor(target: Target) -> Processor:
    has = {name[1:] for name in target.features.split(",") if name.startswith("+")}
    if target.architecture == "x86":
        wide = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= has
        narrow = {"avx2", "fma", "f16c"} <= has
        vnni = "avx512vnni" in has if wide else "avxvnni" in has
        return Processor(
            lanes=16 if wide else 8 if narrow else 4,
            pairs=wide and "avx512bf16" in has,
            fast_pairs=wide and "avx512bf16" in has and target.cpu.startswith("znver"),
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
            fast_pairs="bf16" in has,
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
    load_x: Callable[[Code, Value], Value]
    load_weight: Callable[[Code, Value], Value]
    dot: Callable[[Code, Value, Value, Value], Value]
    factor: float = 1.0
    offset: int = 0


def plain_format(at: Processor, x: str, weight: str) -> Format:
    """Float x, bfloat16 or float32, times weights of any dtype."""
    factor = 256.0 if weight == "float8_e4m3fn" else 1.0
    if x == "bfloat16" and at.pairs and weight != "float32":
        step = 2 * at.lanes

        def load(dtype: str) -> Callable[[Code, Value], Value]:
            return lambda code, place: _pairs(code, at, place, dtype, step)

        return Format(x, weight, step, vector(F32, at.lanes), load(x), load(weight), _dot_pairs, factor)

    def floats(dtype: str) -> Callable[[Code, Value], Value]:
        return lambda code, place: as_floats(code, at, place, dtype, at.lanes)

    return Format(x, weight, at.lanes, vector(F32, at.lanes), floats(x), floats(weight), _dot_floats, factor)


def byte_format(at: Processor) -> Format:
    """Bytes times bytes."""
    sums = vector(I32, at.lanes)
    step = {"madd": at.lanes * 2, "widened": at.lanes}.get(at.bytes, at.lanes * 4)

    def raw(code: Code, place: Value) -> Value:
        return code.load(vector(I8, step), place)

    def wide(code: Code, place: Value) -> Value:
        return raw(code, place).to(vector(I16 if at.bytes == "madd" else I32, step))

    def unsigned(code: Code, place: Value) -> Value:
        return raw(code, place) ^ -128

    if at.bytes == "vnni":  # multiplies unsigned by signed bytes
        return Format("int8", "int8", step, sums, raw, unsigned, _dot_vnni, offset=128)
    load = raw if at.bytes == "sdot" else wide
    dot = {"sdot": _dot_sdot, "madd": _dot_madd, "widened": _dot_widened}[at.bytes]
    return Format("int8", "int8", step, sums, load, load, dot)


def dot_small(code: Code, at: Processor, sums: Value, x: Value, weight: Value) -> Value:
    """Adds products of bytes to sums, int32 [lanes]; vectors of four bytes per lane.

    Args:
        x: signed.
        weight: from 0 to 15, so that sums of two products fit in 16 bits.
    """
    if at.bytes == "vnni":
        return _dot_vnni(code, sums, x, weight)
    if at.bytes == "sdot":
        return _dot_sdot(code, sums, x, weight)
    if at.bytes == "madd":
        kind = vector(I16, 2 * at.lanes)
        products = code.call(PMADDUBSW[at.lanes], kind, weight, x)
        return _dot_madd(code, sums, products, code.constant(kind, 1))
    wide = vector(I32, 4 * at.lanes)
    products = x.to(wide) * weight.to(wide)
    for start in range(0, 4 * at.lanes, at.lanes):
        sums = sums + products.pick(range(start, start + at.lanes))
    return sums


def dot_shorts(code: Code, at: Processor, x: Value, weight: Value) -> Value:
    """Sums of two products of int16 [2 * lanes], int32 [lanes]."""
    if at.lanes in MADD:
        return code.call(MADD[at.lanes], vector(I32, at.lanes), x, weight)
    wide = vector(I32, 2 * at.lanes)
    products = x.to(wide) * weight.to(wide)
    return products.pick(range(at.lanes)) + products.pick(range(at.lanes, 2 * at.lanes))


def as_floats(code: Code, at: Processor, place: Value, dtype: str, count: int) -> Value:
    """Converts stored numbers to float32; those of e4m3 are divided by 256."""
    kind, bits = vector(F32, count), vector(I32, count)
    if dtype == "float32":
        return code.load(kind, place)
    if dtype == "bfloat16":
        return (code.load(vector(I16, count), place).unsigned_to(bits) << 16).bits(kind)
    stored = code.load(vector(I8, count), place)
    if dtype == "int8":
        return stored.to(kind)
    short = stored.to(vector(I16, count))
    if at.halves:  # the bits of a float16 with a different exponent bias
        return ((short << 7) & (0xBFFF - 0x10000)).bits(vector(F16, count)).to(kind)
    wide = stored.to(bits)
    size = (wide & 0x7F) << 20
    # The smallest normal number, which the next exponent adds to a subnormal one.
    smallest = 2.0**-14
    small = (size | (113 << 23)).bits(kind) - smallest
    magnitude = size.below(1 << 23).choose(small.bits(bits), size + (112 << 23))
    return (magnitude | (wide & -(1 << 31))).bits(kind)


def _pairs(code: Code, at: Processor, place: Value, dtype: str, step: int) -> Value:
    """Loads bfloat16."""
    if dtype == "bfloat16":
        return code.load(vector(BF16, step), place)
    half = step // 2
    return as_pairs(
        *(as_floats(code, at, place + part * SIZES[dtype] * half, dtype, half) for part in (0, 1))
    )


def as_pairs(low: Value, high: Value) -> Value:
    """Combines two vectors of float32 that are bfloat16 numbers into one of bfloat16."""
    count = 2 * low.kind.count
    low, high = (part.bits(vector(I16, count)) for part in (low, high))
    upper = [2 * n + 1 for n in range(count)]  # upper half of each number
    return low.shuffled(high, upper).bits(vector(BF16, count))


def _dot_pairs(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    by_arm, by_x86 = "llvm.aarch64.neon.bfdot.v4f32.v8bf16", "llvm.x86.avx512bf16.dpbf16ps.512"
    return code.call(by_x86 if sums.kind.count == 16 else by_arm, sums.kind, sums, x, weight)


def _dot_floats(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    return code.fma(x, weight, sums)


def _dot_vnni(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.kind.count}"
    if llvm.llvm_version_info[0] < 22:  # older versions take words of four numbers
        x, weight = x.bits(sums.kind), weight.bits(sums.kind)
    return code.call(name, sums.kind, sums, weight, x)


def _dot_sdot(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    return code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.kind, sums, x, weight)


def _dot_madd(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    return sums + code.call(MADD[sums.kind.count], sums.kind, x, weight)


def _dot_widened(code: Code, sums: Value, x: Value, weight: Value) -> Value:
    return sums + x * weight
