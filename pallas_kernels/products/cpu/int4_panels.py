"""Products of many rows with four-bit weights by panels, see `panels.py`.

Numbers are expanded while a panel is packed: to the bfloat16 weights of `int4.py`, or to bytes with the codes
of `int4_bytes.py`. Sums of codes times bytes are scaled at the end of each group.
"""

from __future__ import annotations

from pallas_kernels.llvm import native
from pallas_kernels.llvm.blocks import transposed
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES, Format, byte_format, plain_format, processor
from pallas_kernels.llvm.types import F32, I8, I32, I64, LANES, PTR, VOID, vector
from pallas_kernels.llvm.values import Value
from pallas_kernels.products.cpu.int4 import KINDS, LOW, Int4Format, Packed, packed_of, tiles_of, weights_of
from pallas_kernels.products.cpu.int4_bytes import CONSECUTIVE, HALF, SIGNS
from pallas_kernels.products.cpu.multiply import quantize
from pallas_kernels.products.cpu.panels import LINE, OUTS, VECTOR, WORD, WORDS, Pack, shape_of, write
from pallas_kernels.quantization.int4 import GROUPS, TILE

PIECE = GROUPS[0]  # bytes that are added to a sum at once


def int4_panels_module(target: native.Target, group: int, offset: bool, kind: str = "int4") -> str:
    """The functions `multiply` and `parts` of bfloat16 x, values, scale and, if weights have offsets,
    offset.
    """
    at, code = processor(target), Code()
    fmt = plain_format(at, "bfloat16", "bfloat16")
    unpacked = Int4Format(at, fmt, group, offset, kind)
    *packed, to = code.function("pack", (*KINDS, PTR))
    weight = Packed(*packed)
    shape = shape_of(at)
    with code.loop(0, tiles_of(weight.size)) as tile, code.loop(0, OUTS, LANES) as out:
        lanes = [weights_of(code, unpacked, weight.at(out + lane), tile) for lane in range(LANES)]
        for step, outs in enumerate(zip(*lanes, strict=True)):
            for line, turned in enumerate(transposed([each.bits(vector(I32)) for each in outs])):
                word = tile * (TILE // 2) + (step * LANES + line)
                code.store(turned, to + shape.place(word, out), VECTOR)
    write(code, at, fmt, _pack(code, fmt, group, offset))
    return code.text()


def int4_bytes_panels_module(
    target: native.Target, x: str, group: int, offset: bool, hadamard: int = 1
) -> str:
    """The functions `quantize`, `quantize_parts`, `multiply` and `parts` of x, values, scale and, if weights
    have offsets, offset.

    Results: out, bytes of x, their scales, their sums by group, float32 [rows, groups], without offsets
    int32 and times -8; with a hadamard block above 1, also x transformed, float32.
    """
    at, code = processor(target), Code()
    _sums(code, group, offset)

    def add(frame: Value, row: Value, size: Value) -> None:
        (source, _), (sums, shape) = code.result(frame, 1), code.result(frame, 3)
        code.call("sums", VOID, source + row * size, sums + row * code.word(shape, 1) * 4, size)

    quantize(code, at, x, 1, 2, transformed=(hadamard, 4), then=add)
    *packed, to = code.function("pack", (*KINDS, PTR))
    weight, fmt, shape = Packed(*packed), byte_format(at), shape_of(at)
    with code.loop(0, tiles_of(weight.size)) as tile, code.loop(0, OUTS, LANES) as out:
        places = [weight.at(out + lane).words + tile * (TILE // 2) for lane in range(LANES)]
        lines = []
        for place in places:
            code.prefetch(place + WORDS * WORD // 2, far=True)
            codes = (code.load(vector(I32), place) ^ SIGNS).bits(vector(I8, VECTOR))
            lines.append(codes.pick(CONSECUTIVE).bits(vector(I32)))
        for line, turned in enumerate(transposed(lines)):
            for high, codes in enumerate((turned, turned >> 4)):
                word = tile * (TILE // WORD) + (line // HALF * 2 + high) * HALF + line % HALF
                code.store(codes & LOW, to + shape.place(word, out), VECTOR)
    _pack_scales(code, weight, to + WORDS * LINE, group, offset)
    write(code, at, fmt, _pack(code, fmt, group, offset), group, offset)
    return code.text()


def _pack(code: Code, fmt: Format, group: int, offset: bool) -> Pack:
    """Calls the function `pack` of (*Packed, address)."""

    def pack(frame: Value, o: Value, first: Value, words: Value, to: Value) -> None:
        whole = packed_of(code, frame, offset, words * WORD // SIZES[fmt.x])
        code.call("pack", VOID, *whole.at(o).after(first // SIZES[fmt.x], group), to)

    return pack


def _pack_scales(code: Code, weight: Packed, to: Value, group: int, offset: bool) -> None:
    """For each group, stores the scales of a panel's outputs and, with offsets, what a row's sum of bytes is
    multiplied by: codes are larger by 8 than numbers.
    """
    kind, eight = vector(F32), code.constant(vector(F32), -8.0)
    outs = code.constant(vector(I64), [*range(LANES)]) * (weight.scale_row // 4).splat()
    with code.loop(0, (weight.size + (group - 1)) // group) as index, code.loop(0, OUTS, LANES) as out:
        packed, line = weight.at(out), to + (index * (2 * LINE) + out * WORD)
        scale = code.gather(kind, packed.scale + index * 4, outs)
        code.store(scale, line, VECTOR)
        if offset:
            by_sum = code.fma(scale, eight, code.gather(kind, packed.offset + index * 4, outs))
            code.store(by_sum, line + LINE, VECTOR)


def _sums(code: Code, group: int, offset: bool) -> None:
    """Writes the function `sums` of a row's bytes, the address of sums by group, and the number of bytes."""
    source, into, size = code.function("sums", (PTR, PTR, I64))
    kind = vector(I32, PIECE)
    with code.loop(0, size, group) as first:
        added = code.variable(code.constant(kind, 0))
        with code.loop(first, (first + group).least(size), PIECE) as at:
            added.set(added.get() + code.load(vector(I8, PIECE), source + at).to(kind))
        total = code.reduced("add", added.get())
        code.store(total.to(F32) if offset else total * -8, into + first // group * 4, 4)
