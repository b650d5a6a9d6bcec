"""Paged attention on a CPU, for tiles of queries and single queries: blocks of rows times blocks of tokens,
with an online softmax.

A row is one query head of one query. The rows of a kv head share loads. An item is a block of rows. It visits
blocks of tokens, converts their keys and values once to the form for products, and multiplies all of its
rows, a strip at a time. Blocks of tokens begin at multiples of SPAN, and a block that a row does not see
changes none of its numbers. So a row's sums do not depend on its tile, on other rows, or on the distribution
of items.

Single queries at consecutive positions of a sequence, whose tables name the same pages, form blocks too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from pallas_kernels.attention.cpu.arguments import Arguments, Block
from pallas_kernels.attention.cpu.blocks import (
    BYTES,
    LEAST,
    SPAN,
    Product,
    Softmax,
    numbers,
    pack_keys,
    pack_values,
)
from pallas_kernels.attention.cpu.form import Form
from pallas_kernels.llvm import amx
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.formats import SIZES
from pallas_kernels.llvm.math import LOG2_E, rounded
from pallas_kernels.llvm.types import F32, I32, I64, LANES, vector
from pallas_kernels.llvm.values import Value

NO_SINK = -1e30  # adds exactly zero to a sum of weights


def source(form: Form) -> str:
    """The source of a module with the kernel, a function of (frame, part, parts).

    Arguments: queries [tiles, tile, heads, head_dim] (decode: [queries, heads, head_dim]); block tables;
    lengths; positions (not for decode); the last token that each query sees (if it may be a later one);
    options float32 [scale, cap or 0, window or 0, a sink for each head
    or NO_SINK, a slope for each head or 0]; keys and their scales if any; values and their scales if any. The
    result has the shape of the queries.
    """
    code = Code()
    frame, part, parts = code.kernel(form.name)
    with amx.configured(code) if form.tiles else nullcontext():
        _write(code, form, frame, part, parts)
    return code.text()


def _write(code: Code, form: Form, frame: Value, part: Value, parts: Value) -> None:
    args = Arguments(code, frame, form, parts)
    alone = _Item(code, form, args)
    together = _Item(code, form.several, args) if form.several else None
    total = code.variable(code.whole(0))
    for block in args.blocks():
        total.set(total.get() + block.cost)
    whole = total.get() * args.kv_heads
    before = code.variable(code.whole(0))
    for block in args.blocks():
        with code.loop(0, args.kv_heads) as head:
            mine = (before.get() * parts // whole).equals(part)
            before.set(before.get() + block.cost)
            if together is None:
                with code.when(mine):
                    alone.write(block, head)
                continue
            with code.when(mine), code.if_else(block.real > 1) as (several, single):
                with several:
                    together.write(block, head)
                with single:
                    alone.write(block, head)


def _memory(code: Code, size: int) -> Value:
    """The address of this many bytes on the stack, as an integer. With pointers, LLVM simplifies addresses
    across loops, and single queries take 5 % longer.
    """
    return code.memory(size).to(I64)


@dataclass(frozen=True)
class _Tokens:
    """SPAN tokens of a kv head.

    Attributes:
        tile: index of the row of block tables.
        head: the kv head.
        oldest, end: range of tokens that some query attends to.
        first: the first of the tokens.
    """

    tile: Value
    head: Value
    oldest: Value
    end: Value
    first: Value


class _Item:
    """A block of queries for one kv head, and its memory."""

    def __init__(self, code: Code, form: Form, args: Arguments) -> None:
        self.code, self.form, self.args = code, form, args
        self.row = form.head_dim * SIZES[form.inputs]  # bytes of a row of queries
        memory = partial(_memory, code)
        self.depth, self.wide = SPAN // 2 if form.pair_values else SPAN, form.vectors * BYTES
        rows = form.strip * -(-form.rows // form.strip)
        # for this block and the next: of numbers, then of scales
        self.places = memory((4 if form.quantized else 2) * SPAN * 8)
        self.q, self.sums = memory(rows * form.depth * 4), memory(rows * self.wide)
        self.keys, self.values = memory(form.depth * SPAN * 4), memory(self.depth * self.wide)
        self.scores, self.weights = (memory(form.strip * SPAN * 4) for _ in range(2))
        scales = (memory(SPAN * 4), memory(SPAN * 4)) if form.quantized else (None, None)
        scale, cap = args.scale, args.cap
        self.softmax = Softmax(
            position=memory(rows * 4),
            reach=memory(rows * 4) if form.ahead else None,
            slope=memory(rows * 4),
            largest=memory(rows * 4),
            factor=memory(rows * 4),
            total=memory(rows * BYTES),
            lanes=memory(form.strip * BYTES),
            less=memory(form.strip * 4),
            k_scale=scales[0],
            v_scale=scales[1],
            window=args.window.to(I32),
            scale=(cap > 0.0).choose(code.constant(F32, 1.0), scale) * LOG2_E,
            cap=cap,
            twice=scale / cap.most(1e-30) * (2 * LOG2_E),
        )
        strip, tiles, line = form.strip, form.tiles, SPAN * 4
        self.of_scores = Product(
            strip, form.columns, form.depth, form.pair_keys, tiles, form.depth * 4, line, line
        )
        self.of_values = Product(
            strip, form.block, self.depth, form.pair_values, tiles, self.depth * 4, self.wide, self.wide
        )

    def write(self, block: Block, head: Value) -> None:
        code, args, group = self.code, self.args, self.form.group
        base = ((block.tile * args.tile + block.first) * args.heads + head * group) * self.row
        with code.loop(block.real, block.count) as query, code.loop(0, group) as member:
            self._put(args.out + base + (query * args.heads + member) * self.row)
        with code.when(block.real > 0):
            rows = block.real * group
            padded = (rows + (self.form.strip - 1)) // self.form.strip * self.form.strip
            self._begin(block, head, args.q + base, padded)
            self._visit(block, head, padded)
            with code.loop(0, rows) as row:
                sink = code.load(F32, args.sinks + (head * group + row % group) * 4)
                self._put(args.out + base + (row // group * args.heads + row % group) * self.row, row, sink)

    def _begin(self, block: Block, head: Value, q: Value, rows: Value) -> None:
        """Initializes rows. Rows after the last real one repeat the last query."""
        code, form, soft = self.code, self.form, self.softmax
        size, at_once = SIZES[form.inputs], 2 * LANES if form.pair_keys else LANES
        nothing = code.constant(vector(F32), 0.0)
        with code.loop(0, rows) as row:
            query = (row // form.group).least(block.real - 1)
            code.store((block.position + query).to(I32), soft.position + row * 4)
            if soft.reach is not None:
                last = self.args.last_seen(block.tile, block.first + query)
                code.store((last - block.position - query).to(I32), soft.reach + row * 4)
            code.store(
                code.load(F32, self.args.slopes + (head * form.group + row % form.group) * 4),
                soft.slope + row * 4,
            )
            code.store(code.constant(F32, LEAST), soft.largest + row * 4)
            code.store(nothing, soft.total + row * BYTES)
            at = q + (query * self.args.heads + row % form.group) * self.row
            for line, first in enumerate(range(0, form.head_dim, at_once)):
                count = min(form.head_dim - first, at_once)
                code.store(
                    numbers(code, at + first * size, form.inputs, form.pair_keys, count),
                    self.q + row * (form.depth * 4) + line * BYTES,
                )
            for n in range(form.vectors):
                code.store(nothing, self.sums + row * self.wide + n * BYTES)

    def _visit(self, block: Block, head: Value, rows: Value) -> None:
        """Visits each block of tokens."""
        code, form, args, soft = self.code, self.form, self.args, self.softmax
        start = block.oldest // SPAN * SPAN
        self._find(_Tokens(block.tile, head, block.oldest, block.end, start), self._places(start))
        with code.loop(start, block.end, SPAN) as first:
            places, later = self._places(first), self._places(first + SPAN)
            self._find(self._next(block, head, first + SPAN), later)
            pack_keys(code, form, places, later, args.keys, self.keys)
            if not form.in_place:
                pack_values(code, form, places, later, args.values, self.values)
            for to, scales in (soft.k_scale, args.k_scales), (soft.v_scale, args.v_scales):
                if to is not None and scales is not None:
                    with code.loop(0, SPAN, LANES) as lane:
                        place = code.load(vector(I64), self._scale_places(places) + lane * 8)
                        code.store(code.gather(vector(F32), scales, place), to + lane * 4)
            # The rows before it belong to earlier queries.
            seeing = (first - block.position).most(0) * form.group // form.strip * form.strip
            if form.ahead:
                seeing = code.whole(0)
            with code.loop(seeing, rows, form.strip) as row:
                self._strip(row, first, places, later)

    def _strip(self, row: Value, first: Value, places: Value, later: Value) -> None:
        """Processes some rows of queries with the block of tokens that starts at `first`.

        Args:
            places, later: addresses of this block's tokens, and of those that are prefetched.
        """
        code, form = self.code, self.form
        with code.loop(0, SPAN * 4, form.columns * BYTES) as column:
            self.of_scores.write(
                code,
                self.q + row * (form.depth * 4),
                self.keys + column,
                self.scores + column,
                meanwhile=partial(self._fetch_keys, later) if form.spread else None,
            )
        self.softmax.write(code, row, first, self.scores, self.weights, form.strip, form.pair_values)
        with code.loop(0, self.wide, form.block * BYTES) as column:
            to = self.sums + row * self.wide + column
            self.of_values.write(
                code,
                self.weights,
                self._values(places, later, column) if form.in_place else self.values + column,
                to,
                self.softmax.factor + row * 4,
            )

    def _fetch_keys(self, later: Value, k: Value) -> None:
        """Prefetches the last half of the next block's keys, a share before each of `depth` steps."""
        code, form = self.code, self.form
        row = form.head_dim * SIZES[form.stored]
        lines = -(-row // BYTES)  # of a key
        share = -(-SPAN // 2 * lines // form.depth)
        for n in range(share):
            line = (k * share + n).least(SPAN // 2 * lines - 1)
            place = code.load(I64, later + (SPAN // 2 + line // lines) * 8)
            code.prefetch(self.args.keys + place * row + line % lines * BYTES, far=True)

    def _values(self, places: Value, later: Value, column: Value) -> Callable[[Value, int], Value]:
        """Values read in place."""
        code, form, size = self.code, self.form, SIZES[self.form.stored]
        base = self.args.values + column // 4 * size

        def read(token: Value, n: int) -> Value:
            if n == 0:
                following = base + code.load(I64, later + token * 8) * (form.head_dim * size)
                for at in range(0, form.block * LANES * size, BYTES):
                    code.prefetch(following + at, far=True)
            place = base + code.load(I64, places + token * 8) * (form.head_dim * size)
            return numbers(code, place + n * (LANES * size), form.stored, False, LANES).bits(vector(F32))

        return read

    def _places(self, first: Value) -> Value:
        """Addresses for the block of tokens that starts at `first`."""
        return self.places + first // SPAN % 2 * (SPAN * 8)

    def _scale_places(self, places: Value) -> Value:
        """Addresses of the scales of the tokens at `places`."""
        return places + 2 * SPAN * 8

    def _next(self, block: Block, head: Value, first: Value) -> _Tokens:
        """The tokens to prefetch: this block's from `first` on. After its last ones, the first tokens of the
        next head; after the last head, of the next decode row.
        """
        args = self.args
        start = block.oldest // SPAN * SPAN
        more, same = first < block.end, head + 1 < args.kv_heads
        tokens = _Tokens(
            block.tile,
            more.choose(head, same.choose(head + 1, head)),
            block.oldest,
            block.end,
            more.choose(first, start),
        )
        if not self.form.spread:
            return tokens
        row = (block.tile + 1).least(args.tiles - 1)
        end = args.length(row)
        oldest = args.oldest(end - 1)
        stays = more | same | (end <= 0)
        return _Tokens(
            stays.choose(block.tile, row),
            stays.choose(tokens.head, 0),
            stays.choose(block.oldest, oldest),
            stays.choose(block.end, end),
            stays.choose(tokens.first, oldest // SPAN * SPAN),
        )

    def _find(self, at: _Tokens, to: Value) -> None:
        """Finds the address of each of SPAN tokens. For a token that no query attends to, uses another's
        address.
        """
        code, size = self.code, self.form.page_size
        table = self.args.tables + at.tile * self.args.width * 4
        first, head, oldest, newest = at.first, at.head, at.oldest, at.end - 1
        with code.loop(0, SPAN, LANES) as lane:
            tokens = (first + lane).to(I32).splat() + code.constant(vector(I32), list(range(LANES)))
            tokens = tokens.most(oldest.to(I32).splat()).least(newest.to(I32).splat())
            if size % LANES:
                pages = code.gather(vector(I32), table, tokens // size).to(vector(I64))
            else:  # all are in one page
                pages = (
                    code.load(I32, table + (first + lane).most(oldest).least(newest) // size * 4)
                    .to(I64)
                    .splat()
                )
            offset = (tokens % size).to(vector(I64))
            code.store((pages * self.args.kv_heads.splat() + head.splat()) * size + offset, to + lane * 8)
            if self.form.quantized:
                place = (pages * self.args.scale_rows.splat() + head.splat()) * size + offset
                code.store(place, self._scale_places(to) + lane * 8)

    def _put(self, to: Value, row: Value | None = None, sink: Value | None = None) -> None:
        """Stores a row's result, or zeros."""
        code, form = self.code, self.form
        if row is not None and sink is not None:
            total = code.sum(code.load(vector(F32), self.softmax.total + row * BYTES))
            total = (total + self.softmax.weight_of(code, row, sink)).most(1e-30)
            inverse = (1.0 / total).splat()
        for at in range(0, form.head_dim, LANES):
            real = code.constant(vector(F32), 0.0)
            if row is not None:
                real = code.load(vector(F32), self.sums + row * self.wide + at * 4) * inverse
            stored = real if form.inputs == "float32" else rounded(code, real, form.pair_keys)
            code.store_some(stored, to + at * SIZES[form.inputs], min(form.head_dim - at, LANES))
