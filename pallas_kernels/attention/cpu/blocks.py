"""Building blocks of attention on a CPU: conversion of numbers to the form for products, products, and
softmax weights.

Products multiply 32-bit numbers: a float32, or a pair of bfloat16 if the processor multiplies pairs. A
product's left side is stored row by row, and one number at a time is broadcast to all lanes. Its right side
is stored so that a vector has that number's counterparts for 16 columns. For scores this is the transpose of
the keys; for results, pairs are the values of two tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pallas_kernels.attention.cpu.form import Form
from pallas_kernels.llvm import amx
from pallas_kernels.llvm.blocks import joined, transposed
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES
from pallas_kernels.llvm.math import LARGEST_POWER, LOG2_E, power_of_two, rounded
from pallas_kernels.llvm.types import BF16, F32, I1, I8, I16, I32, I64, LANES, PTR, vector
from pallas_kernels.llvm.values import Value, Variable

SPAN = 64  # tokens of a block
BYTES = 64  # of a vector
LEAST, MASKED = -1e29, -1e30  # for rows that have seen no token yet: 2 ** (MASKED - LEAST) is 0, not NaN


def numbers(code: Code, address: Value, stored: str, pairs: bool, count: int) -> Value:
    """Loads 16 float32 or 32 bfloat16 from stored numbers, as 16 int32; 0 from the count-th on. uint8 is the
    bits of e4m3."""
    total = 2 * LANES if pairs else LANES
    kind = {"bfloat16": I16, "float32": F32, "int8": I8, "uint8": I8}[stored]
    read = code.load_some(vector(kind, total), address, count)
    if stored == "bfloat16":
        return read.bits(vector(I32)) if pairs else read.unsigned_to(vector(I32)) << 16
    if stored == "float32":
        return read.bits(vector(I32))
    wide = (read.to(vector(I32, total)).to(vector(F32, total))) if stored == "int8" else _of_e4m3(read, total)
    return (wide.to(vector(BF16, total)) if pairs else wide).bits(vector(I32))


def _of_e4m3(bits: Value, total: int) -> Value:
    kind, real = vector(I32, total), vector(F32, total)
    whole = bits.unsigned_to(kind)
    size = (whole & 0x7F) << 20
    # the smallest normal number, which the next exponent adds to a subnormal one
    small = (size | (121 << 23)).bits(real) - 2.0**-6
    magnitude = ((whole & 0x78).equals(0)).choose(small, (size + (120 << 23)).bits(real))
    return (magnitude.bits(kind) | ((whole & 0x80) << 24)).bits(real)


@dataclass(frozen=True)
class Product:
    """A product of a block of rows and vectors of columns, held in registers.

    Attributes:
        rows, columns: size of the block; columns in vectors.
        depth: number of 32-bit numbers in each row.
        pairs: whether these are pairs of bfloat16, or float32.
        tiles: whether AMX multiplies the pairs; then the block has 16 rows, and `right` is an address.
        left, right, out: bytes from one row to the next.
    """

    rows: int
    columns: int
    depth: int
    pairs: bool
    tiles: bool
    left: int
    right: int
    out: int

    def write(
        self,
        code: Code,
        left: Value,
        right: Value | Callable[[Value, int], Value],
        out: Value,
        factors: Value | None = None,
        meanwhile: Callable[[Value], None] | None = None,
    ) -> None:
        """out = left @ right, or out = factors * out + left @ right, with a float32 factor for each row.

        Args:
            right: its address, or a function that returns the n-th vector of row k.
            left, out, factors: addresses.
            meanwhile: writes code that runs before row k of `right` is multiplied.
        """
        if self.tiles:
            assert isinstance(right, Value)
            return self._write_tiles(code, left, right, out, factors)

        sums: list[Variable] = []
        for row in range(self.rows):
            factor = None if factors is None else code.load(F32, factors + row * 4).splat()
            for n in range(self.columns):
                first = code.constant(vector(F32), 0.0)
                if factor is not None:
                    first = code.load(vector(F32), out + row * self.out + n * BYTES) * factor
                sums.append(code.variable(first))
        with code.loop(0, self.depth) as k:
            if meanwhile is not None:
                meanwhile(k)
            if isinstance(right, Value):
                ours = [
                    code.load(vector(F32), right + k * self.right + n * BYTES) for n in range(self.columns)
                ]
            else:
                ours = [right(k, n) for n in range(self.columns)]
            for row in range(self.rows):
                mine = code.load(F32, left + row * self.left + k * 4).splat()
                for n, other in enumerate(ours):
                    total = sums[row * self.columns + n]
                    total.set((code.pairs if self.pairs else code.fma)(mine, other, total.get()))
        for row in range(self.rows):
            for n in range(self.columns):
                code.store(sums[row * self.columns + n].get(), out + row * self.out + n * BYTES)

    def _write_tiles(self, code: Code, left: Value, right: Value, out: Value, factors: Value | None) -> None:
        columns, instruction = range(self.columns), partial(amx.instruction, code)

        def move(name: str, register: int, place: Value, row_bytes: int) -> None:
            instruction(name, register, place.to(PTR), code.whole(row_bytes))

        if factors is not None:
            with code.loop(0, self.rows) as row:
                factor = code.load(F32, factors + row * 4).splat()
                for place in (out + row * self.out + n * BYTES for n in columns):
                    code.store(code.load(vector(F32), place) * factor, place)
        for n in columns:  # registers: sums; 4 for `left`; 5 and 6 take turns for `right`
            if factors is None:
                instruction("tilezero", n)
            else:
                move("tileloadd64", n, out + n * BYTES, self.out)
        with code.loop(0, self.depth, LANES) as k:
            move("tileloadd64", 4, left + k * 4, self.left)
            for n in columns:
                move("tileloadd64", 5 + n % 2, right + k * self.right + n * BYTES, self.right)
                instruction("tdpbf16ps", n, 4, 5 + n % 2)
        for n in columns:
            move("tilestored64", n, out + n * BYTES, self.out)


def pack_keys(code: Code, form: Form, places: Value, later: Value, base: Value, to: Value) -> None:
    """Transposes keys of SPAN tokens: to[depth][SPAN].

    Args:
        places: addresses of the tokens' keys, int64 [SPAN], in an array of keys that begins at base.
        later: addresses of the next block's keys, which are prefetched; of `Form.spread`, half of them.
    """
    total, row = 2 * LANES if form.pair_keys else LANES, form.head_dim * SIZES[form.stored]
    whole, rest = divmod(form.head_dim, total)
    share = LANES // 2 if form.spread else LANES

    def turn(group: Value, line: Value | int, count: int) -> None:
        start, lines = base + line * (total * SIZES[form.stored]), []
        for n in range(LANES):
            place = code.load(I64, places + (group * LANES + n) * 8)
            lines.append(numbers(code, place * row + start, form.stored, form.pair_keys, count))
        for n in range(share):
            place = code.load(I64, later + (group * share + n) * 8)
            code.prefetch(place * row + start, far=True)
        for n, turned in enumerate(transposed(lines)):
            code.store(turned, to + (line * LANES + n) * (SPAN * 4) + group * BYTES)

    with code.loop(0, SPAN // LANES) as group:
        with code.loop(0, whole) as line:
            turn(group, line, total)
        if rest:
            turn(group, whole, rest)


def pack_values(code: Code, form: Form, places: Value, later: Value, base: Value, to: Value) -> None:
    """Arranges values of SPAN tokens: to[SPAN][vectors], or pairs of two tokens to[SPAN / 2][vectors]. Lanes
    after head_dim are 0. Arguments are as in `pack_keys`."""
    pairs, stored, vectors = form.pair_values, form.stored, form.vectors
    at_once, row = 2 if pairs else 1, form.head_dim * SIZES[stored]
    total = 2 * LANES if pairs else LANES

    with code.loop(0, SPAN // at_once) as k:
        rows, next_rows = (
            [base + code.load(I64, all_ + (k * at_once + n) * 8) * row for n in range(at_once)]
            for all_ in (places, later)
        )
        for token in next_rows:
            for at in range(0, row, BYTES):
                code.prefetch(token + at, far=True)
        line = to + k * (vectors * BYTES)
        for first in range(0, vectors * LANES, total):
            count = form.head_dim - first
            if count <= 0:
                code.store(code.constant(vector(I32), 0), line + first * 4)
                continue
            read = [
                numbers(code, token + first * SIZES[stored], stored, pairs, min(count, total))
                for token in rows
            ]
            if not pairs:
                code.store(read[0], line + first * 4)
                continue
            a, b = (token.bits(vector(I16, total)) for token in read)
            for half in range(2):
                lanes = [half * LANES + lane // 2 + (total if lane % 2 else 0) for lane in range(total)]
                code.store(a.shuffled(b, lanes).bits(vector(I32)), line + first * 4 + half * BYTES)


@dataclass(frozen=True)
class Softmax:
    """Addresses and options for the rows of an online softmax (Milakov and Gimelshein, 2018), in powers of
    two.

    Attributes:
        position: int32 [rows], of each row's query.
        reach: int32 [rows], how many tokens behind its own each query sees; None: none.
        slope: float32 [rows], at least 0; its product with a key's distance is subtracted from a score,
            before it is multiplied by scale.
        largest, factor: float32 [rows]: largest score so far; factor for the previous sums.
        total: float32 [rows, 16]: sums of weights, by lane.
        lanes, less: float32 [strip, 16] and [strip]: largest scores by lane, and what is added to exponents.
        k_scale, v_scale: float32 [SPAN] for a quantized cache, or None.
        window: int32, number of tokens that a query attends to.
        scale: float32, above 0; scores are multiplied by scale times log2(e), after the cap if there is one.
        cap: float32; 0: none.
        twice: float32, 2 log2(e) scale / cap.
    """

    position: Value
    reach: Value | None
    slope: Value
    largest: Value
    factor: Value
    total: Value
    lanes: Value
    less: Value
    k_scale: Value | None
    v_scale: Value | None
    window: Value
    scale: Value
    cap: Value
    twice: Value

    def write(
        self, code: Code, first: Value, start: Value, scores: Value, weights: Value, strip: int, pairs: bool
    ) -> None:
        """Converts the scores of a strip of rows, float32 [strip, SPAN] from token `start` on, to weights,
        [strip, SPAN], bfloat16 if pairs, otherwise float32.

        Args:
            first: the strip's first row.
        """
        row_bytes, weight_bytes = SPAN * 4, SPAN * (2 if pairs else 4)
        hidden = code.constant(I1, 1)
        if self.reach is None:  # the first row's query is the earliest
            earliest, latest = (self._ahead(code, first + n, start) for n in (0, strip - 1))
            hidden = (earliest < SPAN - 1) | (latest >= self.window)
        with code.loop(0, strip) as n:
            place = scores + n * row_bytes
            self._adjust(code, first + n, start, place, hidden)
            code.store(_tree(self._scores(code, place), Value.most), self.lanes + n * BYTES)
        # Of all rows at once: one by one, the rest of each row would wait for its largest score.
        before = code.load(vector(F32, strip), self.largest + first * 4, 4)
        maxima = [code.load(vector(F32), self.lanes + n * BYTES) for n in range(strip)]
        maximum, scale = joined(maxima, Value.most).most(before), self.scale.splat(strip)
        code.store(maximum, self.largest + first * 4, 4)
        code.store(power_of_two(code, (before - maximum) * scale), self.factor + first * 4, 4)
        code.store(0.0 - maximum * scale, self.less, 4)
        with code.loop(0, strip) as n:
            less, factor = (
                code.load(F32, place + n * 4, 4).splat() for place in (self.less, self.factor + first * 4)
            )
            exponents = [
                code.fma(score, self.scale.splat(), less)
                for score in self._scores(code, scores + n * row_bytes)
            ]
            made = [power_of_two(code, exponent, 4 if pairs else 6) for exponent in exponents]
            total = self.total + (first + n) * BYTES
            sums = code.fma(code.load(vector(F32), total), factor, _tree([*made], Value.__add__))
            code.store(sums, total)
            self._store(code, made, weights + n * weight_bytes, pairs)

    def _ahead(self, code: Code, row: Value, start: Value) -> Value:
        """Offset of a row's query from the block's first token."""
        return code.load(I32, self.position + row * 4) - start.to(I32)

    def _scores(self, code: Code, place: Value) -> list[Value]:
        return [code.load(vector(F32), place + at) for at in range(0, SPAN * 4, BYTES)]

    def _adjust(self, code: Code, row: Value, start: Value, place: Value, hidden: Value) -> None:
        """Scales, caps, biases and masks a row's scores in place, where this changes them.

        Args:
            hidden: whether some row of the strip does not see all tokens of the block.
        """

        def change(new: Callable[[int, Value], Value]) -> None:
            for n, score in enumerate(self._scores(code, place)):
                code.store(new(n, score), place + n * BYTES)

        def distance(n: int) -> Value:
            lanes = [n * LANES + lane for lane in range(LANES)]
            return self._ahead(code, row, start).splat() - code.constant(vector(I32), lanes)

        if self.k_scale is not None:
            scales = self.k_scale
            change(lambda n, score: score * code.load(vector(F32), scales + n * BYTES))
        with code.when(self.cap > 0.0):  # cap * tanh(s / cap)

            def capped(n: int, score: Value) -> Value:
                double = power_of_two(code, (score * self.twice.splat()).least(LARGEST_POWER))
                return self.cap.splat() * (1.0 - 2.0 / (double + 1.0))

            change(capped)
        slope = code.load(F32, self.slope + row * 4)
        with code.when(slope > 0.0):
            change(lambda n, score: score - slope.splat() * distance(n).to(vector(F32)))
        with code.when(hidden):
            reach = None if self.reach is None else code.load(I32, self.reach + row * 4).splat()

            def masked(n: int, score: Value) -> Value:
                behind, window = distance(n), self.window.splat()
                if reach is not None:  # distances from the last token that is seen
                    behind, window = behind + reach, window + reach
                return behind.below(window).choose(score, MASKED)

            change(masked)

    def _store(self, code: Code, values: list[Value], place: Value, pairs: bool) -> None:
        for n, weight in enumerate(values):
            if self.v_scale is not None:
                weight = weight * code.load(vector(F32), self.v_scale + n * BYTES)
            if pairs:
                code.store(rounded(code, weight, pairs), place + n * BYTES // 2)
            else:
                code.store(weight, place + n * BYTES)

    def weight_of(self, code: Code, row: Value, sink: Value) -> Value:
        """Weight of a sink in a row's sum of weights: float32."""
        exponent = sink * LOG2_E - code.load(F32, self.largest + row * 4) * self.scale
        return power_of_two(code, exponent.least(LARGEST_POWER))


def _tree(values: list[Value], join: object) -> Value:
    while len(values) > 1:
        values = [join(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]  # type: ignore[operator]
    return values[0]
