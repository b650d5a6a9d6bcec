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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from pallas_kernels.cpu.attention_blocks import (
    BYTES,
    LEAST,
    LOG2_E,
    SPAN,
    Product,
    Softmax,
    numbers,
    pack_keys,
    pack_values,
    rounded,
)
from pallas_kernels.cpu.attention_form import ROWS, Form
from pallas_kernels.cpu.code import Code
from pallas_kernels.cpu.formats import SIZES
from pallas_kernels.cpu.team import PARTS
from pallas_kernels.cpu.types import F32, I1, I32, I64, LANES, vector
from pallas_kernels.cpu.values import Value

NO_SINK = -1e30  # adds exactly zero to a sum of weights
PACKING = 12  # cost of packing a block of tokens, in rows that are multiplied by it


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
    given = _Arguments(code, frame, form, parts)
    alone = _Item(code, form, given)
    together = _Item(code, form.several, given) if form.several else None
    total = code.variable(code.whole(0))
    for block in given.blocks():
        total.set(total.get() + block.cost)
    whole = total.get() * given.kv_heads
    before = code.variable(code.whole(0))
    for block in given.blocks():
        with code.loop(0, given.kv_heads) as head:
            mine = (before.get() * parts // whole).equals(part)
            before.set(before.get() + block.cost)
            if together is None:
                with code.when(mine):
                    alone.write(block, head)
                continue
            with code.when(mine), code.if_else(block.real > 1) as (several, one):
                with several:
                    together.write(block, head)
                with one:
                    alone.write(block, head)
    return code.text()


def _memory(code: Code, size: int) -> Value:
    """The address of this many bytes on the stack, as an integer. With pointers, LLVM simplifies addresses
    across loops, and single queries take 5 % longer.
    """
    return code.memory(size).to(I64)


@dataclass(frozen=True)
class _Block:
    """Queries of a tile or of a sequence's decode rows, and the tokens that they attend to.

    Attributes:
        tile: index of the tile, or of the first of the sequence's rows.
        first, count: range of the queries in the tile, or among these rows.
        real: number of queries without padding, which come first.
        position: position of the first query.
        oldest, end: range of tokens that some query attends to.
        cost: approximate cost of an item in blocks of tokens.
    """

    tile: Value
    first: Value
    count: Value
    real: Value
    position: Value
    oldest: Value
    end: Value
    cost: Value


class _Arguments:
    """Addresses and sizes of the arguments and the result in XLA's call frame."""

    def __init__(self, code: Code, frame: Value, form: Form, parts: Value) -> None:
        self.code, self.form, self.parts = code, form, parts
        index = iter(range(10))

        def argument() -> tuple[Value, Value]:
            return code.argument(frame, next(index))

        self.q, q_shape = argument()
        self.tables, table_shape = argument()
        self.lengths, _ = argument()
        self.positions = None if form.decode else argument()[0]
        self.until = argument()[0] if form.ahead else None
        options, _ = argument()
        self.keys, k_shape = argument()
        scaled = argument() if form.quantized else None
        self.k_scales = None if scaled is None else scaled[0]
        scale_shape = k_shape if scaled is None else scaled[1]
        self.values, _ = argument()
        self.v_scales = argument()[0] if form.quantized else None
        self.out, _ = code.result(frame, 0)
        self.tiles, self.width, self.kv_heads = (
            code.word(shape, n) for shape, n in ((q_shape, 0), (table_shape, 1), (k_shape, 1))
        )
        self.tile = code.whole(1) if form.decode else code.word(q_shape, 1)
        self.scale_rows = code.word(scale_shape, 1)  # of a page, at least one for each kv head
        self.heads = self.kv_heads * form.group
        self.scale, self.cap, window = (code.load(F32, options + n * 4) for n in range(3))
        self.sinks = options + 3 * 4
        self.slopes = self.sinks + self.heads * 4
        self.windowed = window > 0.0
        self.window = self.windowed.choose(window.to(I64), 2**31 - 1)
        if form.several is not None:
            self.share = self._share(parts)

    def blocks(self) -> Iterator[_Block]:
        """A loop over the blocks of queries. May be used once; code written in its body runs for each
        block.
        """
        code = self.code
        for tile, start, length, queries, size in self._tiles():
            with code.loop(0, queries, size) as first:
                own = (queries - first).least(size)
                real, position = (length - first).most(0).least(own), start + first
                oldest, end = self._oldest(position), self._end(tile, first, real, position + real)
                cost = self._spans(oldest, end) * (real * self.form.group + PACKING)
                cost = (real > 0).choose(cost, 1)
                yield _Block(tile, first, own, real, position, oldest, end, cost)

    def _end(self, tile: Value, first: Value, real: Value, end: Value) -> Value:
        """The end of the tokens that some query of a block sees; `end`: that of its own tokens."""
        if self.until is None:
            return end
        code, out = self.code, self.code.variable(end)
        with code.loop(0, real) as query:
            out.set(out.get().most(self.last_seen(tile, first + query) + 1))
        return out.get()

    def last_seen(self, tile: Value, query: Value) -> Value:
        """The last token that a query of a tile sees."""
        assert self.until is not None
        return self.code.load(I32, self.until + (tile * self.tile + query) * 4).to(I64)

    def _tiles(self) -> Iterator[tuple[Value, Value, Value, Value, Value]]:
        """A loop over tiles, or over sequences of decode rows: index, position of the first query, number of
        real queries, of queries, and of queries in a block.
        """
        code = self.code
        if self.positions is not None:
            even = self._even(self.tile, self._most())
            with code.loop(0, self.tiles) as tile:
                start = code.load(I32, self.positions + tile * 4).to(I64)
                yield tile, start, self._length(tile), self.tile, even
            return
        at, several = code.variable(code.whole(0)), self.form.several
        with code.repeat(lambda: at.get() < self.tiles):
            first, size = at.get(), code.variable(code.whole(1))
            at.set(first + 1)
            start = self._length(first) - 1
            if several is not None:
                with code.repeat(lambda: self._continues(first, at.get())):
                    at.set(at.get() + 1)
                with code.when(at.get() - first > 1):
                    share = self.share // self._spans(self._oldest(start), start + 1) + 1
                    size.set(self._even(at.get() - first, share.least(several.rows // several.group)))
            rows = at.get() - first
            yield first, start, (start < 0).choose(0, rows), rows, size.get()

    def _most(self) -> Value:
        """Queries of an item of a tile: fewer than it may have, if there were less than two items for each
        thread otherwise.
        """
        group = self.form.group
        wanted = (self.parts // (PARTS // 2) // (self.tiles * self.kv_heads)).most(1)  # items of a tile
        least = (self.tile + wanted - 1) // wanted
        return least.most(max(ROWS // group, 1)).least(self.form.rows // group)

    def _even(self, count: Value, most: Value) -> Value:
        """The size of equal blocks, each of at most `most`."""
        blocks = (count + most - 1) // most
        return (count + blocks - 1) // blocks

    def _continues(self, first: Value, row: Value) -> Value:
        """Whether a decode row belongs to the sequence of the rows [first, row), at the next position: all
        pages that it reads are theirs.
        """
        code, size = self.code, self.form.page_size
        out = code.variable(code.constant(I1, 0))
        with code.when(row < self.tiles):
            start, newest = self._length(first) - 1, self._length(row) - 1
            with code.when((start >= 0) & newest.equals(start + (row - first))):
                differ = code.variable(code.constant(I32, 0))
                own, theirs = (self.tables + n * self.width * 4 for n in (row, first))
                with code.loop(self._oldest(start) // size, newest // size + 1) as n:
                    differ.set(differ.get() | (code.load(I32, own + n * 4) ^ code.load(I32, theirs + n * 4)))
                out.set(differ.get().equals(0))
        return out.get()

    def _share(self, parts: Value) -> Value:
        """A thread's share of the work on decode rows, in blocks of tokens times rows. An item of several
        rows has at most about as much, so that no thread is idle because there are few sequences.
        """
        code = self.code
        total = code.variable(code.whole(0))
        with code.loop(0, self.tiles) as row:
            end = self._length(row)
            with code.when(end > 0):
                total.set(total.get() + self._spans(self._oldest(end - 1), end))
        return total.get() * self.kv_heads * PARTS // parts

    def _length(self, tile: Value) -> Value:
        return self.code.load(I32, self.lengths + tile * 4).to(I64)

    def _oldest(self, position: Value) -> Value:
        """The first token that a query attends to."""
        return self.windowed.choose((position + 1 - self.window).most(0), 0)

    def _spans(self, oldest: Value, end: Value) -> Value:
        """The approximate number of blocks in a range of tokens."""
        return (end - oldest) // SPAN + 2


class _Item:
    """A block of queries for one kv head, and its memory."""

    def __init__(self, code: Code, form: Form, given: _Arguments) -> None:
        self.code, self.form, self.given = code, form, given
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
        scale, cap = given.scale, given.cap
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
            window=given.window.to(I32),
            scale=(cap > 0.0).choose(code.constant(F32, 1.0), scale) * LOG2_E,
            cap=cap,
            twice=scale / cap.most(1e-30) * (2 * LOG2_E),
        )
        self.of_scores = Product(
            form.strip, form.columns, form.depth, form.pair_keys, form.depth * 4, SPAN * 4, SPAN * 4
        )
        self.of_values = Product(
            form.strip, form.block, self.depth, form.pair_values, self.depth * 4, self.wide, self.wide
        )

    def write(self, block: _Block, head: Value) -> None:
        code, given, group = self.code, self.given, self.form.group
        base = ((block.tile * given.tile + block.first) * given.heads + head * group) * self.row
        with code.loop(block.real, block.count) as query, code.loop(0, group) as member:
            self._put(given.out + base + (query * given.heads + member) * self.row)
        with code.when(block.real > 0):
            rows = block.real * group
            padded = (rows + (self.form.strip - 1)) // self.form.strip * self.form.strip
            self._begin(block, head, given.q + base, padded)
            self._visit(block, head, padded)
            with code.loop(0, rows) as row:
                sink = code.load(F32, given.sinks + (head * group + row % group) * 4)
                self._put(given.out + base + (row // group * given.heads + row % group) * self.row, row, sink)

    def _begin(self, block: _Block, head: Value, q: Value, rows: Value) -> None:
        """Initializes rows. Rows after the last real one repeat the last query."""
        code, form, soft = self.code, self.form, self.softmax
        size, at_once = SIZES[form.inputs], 2 * LANES if form.pair_keys else LANES
        nothing = code.constant(vector(F32), 0.0)
        with code.loop(0, rows) as row:
            query = (row // form.group).least(block.real - 1)
            code.store((block.position + query).to(I32), soft.position + row * 4)
            if soft.reach is not None:
                last = self.given.last_seen(block.tile, block.first + query)
                code.store((last - block.position - query).to(I32), soft.reach + row * 4)
            code.store(
                code.load(F32, self.given.slopes + (head * form.group + row % form.group) * 4),
                soft.slope + row * 4,
            )
            code.store(code.constant(F32, LEAST), soft.largest + row * 4)
            code.store(nothing, soft.total + row * BYTES)
            at = q + (query * self.given.heads + row % form.group) * self.row
            for line, first in enumerate(range(0, form.head_dim, at_once)):
                count = min(form.head_dim - first, at_once)
                code.store(
                    numbers(code, at + first * size, form.inputs, form.pair_keys, count),
                    self.q + row * (form.depth * 4) + line * BYTES,
                )
            for n in range(form.vectors):
                code.store(nothing, self.sums + row * self.wide + n * BYTES)

    def _visit(self, block: _Block, head: Value, rows: Value) -> None:
        """Visits each block of tokens."""
        code, form, given, soft = self.code, self.form, self.given, self.softmax
        start = block.oldest // SPAN * SPAN
        self._find(block, head, start, self._places(start))
        with code.loop(start, block.end, SPAN) as first:
            following, places, later = first + SPAN, self._places(first), self._places(first + SPAN)
            more = following < block.end  # otherwise the next head's first tokens are prefetched
            self._find(
                block,
                more.choose(head, (head + 1).least(given.kv_heads - 1)),
                more.choose(following, start),
                later,
            )
            pack_keys(code, places, later, given.keys, self.keys, form.stored, form.head_dim, form.pair_keys)
            if not form.in_place:
                pack_values(
                    code,
                    places,
                    later,
                    given.values,
                    self.values,
                    form.stored,
                    form.head_dim,
                    form.pair_values,
                    form.vectors,
                )
            for to, scales in (soft.k_scale, given.k_scales), (soft.v_scale, given.v_scales):
                if to is not None and scales is not None:
                    with code.loop(0, SPAN, LANES) as lane:
                        place = code.load(vector(I64), self._scale_places(places) + lane * 8)
                        code.store(code.gather(vector(F32), scales, place), to + lane * 4)
            # The rows before it belong to earlier queries.
            seeing = (first - block.position).most(0) * form.group // form.strip * form.strip
            if form.ahead:
                seeing = code.whole(0)
            with code.loop(seeing, rows, form.strip) as row:
                self._strip(row, first, partial(self._values, places, later) if form.in_place else None)

    def _strip(
        self, row: Value, first: Value, values: Callable[[Value], Callable[[Value, int], Value]] | None
    ) -> None:
        """Processes some rows of queries with the block of tokens that starts at `first`.

        Args:
            values: returns, for a column, the `right` argument of `Product.write`; None: values are packed.
        """
        code, form = self.code, self.form
        with code.loop(0, SPAN * 4, form.columns * BYTES) as column:
            self.of_scores.write(
                code, self.q + row * (form.depth * 4), self.keys + column, self.scores + column
            )
        self.softmax.write(code, row, first, self.scores, self.weights, form.strip, form.pair_values)
        with code.loop(0, self.wide, form.block * BYTES) as column:
            to = self.sums + row * self.wide + column
            self.of_values.write(
                code,
                self.weights,
                values(column) if values else self.values + column,
                to,
                self.softmax.factor + row * 4,
            )

    def _values(self, places: Value, later: Value, column: Value) -> Callable[[Value, int], Value]:
        """Values read in place."""
        code, form, size = self.code, self.form, SIZES[self.form.stored]
        base = self.given.values + column // 4 * size

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

    def _find(self, block: _Block, head: Value, first: Value, to: Value) -> None:
        """Finds the address of each token from `first` on. For a token that no query attends to, uses
        another's address.
        """
        code, size = self.code, self.form.page_size
        table = self.given.tables + block.tile * self.given.width * 4
        oldest, newest = block.oldest, block.end - 1
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
            code.store((pages * self.given.kv_heads.splat() + head.splat()) * size + offset, to + lane * 8)
            if self.form.quantized:
                place = (pages * self.given.scale_rows.splat() + head.splat()) * size + offset
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
