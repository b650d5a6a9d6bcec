"""The arguments of an attention kernel on a CPU, and the blocks of queries in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels.attention.cpu.blocks import SPAN
from pallas_kernels.attention.cpu.form import ROWS, Form
from pallas_kernels.llvm.code import Code
from pallas_kernels.llvm.team import PARTS
from pallas_kernels.llvm.types import F32, I1, I32, I64
from pallas_kernels.llvm.values import Value

PACKING = 12  # cost of packing a block of tokens, in rows that are multiplied by it


@dataclass(frozen=True)
class Block:
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


class Arguments:
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

    def blocks(self) -> Iterator[Block]:
        """A loop over the blocks of queries. May be used once; code written in its body runs for each
        block.
        """
        code = self.code
        for tile, start, length, queries, size in self._tiles():
            with code.loop(0, queries, size) as first:
                count = (queries - first).least(size)
                real, position = (length - first).most(0).least(count), start + first
                oldest, end = self.oldest(position), self._end(tile, first, real, position + real)
                cost = self._spans(oldest, end) * (real * self.form.group + PACKING)
                cost = (real > 0).choose(cost, 1)
                yield Block(tile, first, count, real, position, oldest, end, cost)

    def _end(self, tile: Value, first: Value, real: Value, end: Value) -> Value:
        """The end of the tokens that some query of a block sees.

        Args:
            end: the position behind its last query.
        """
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
                yield tile, start, self.length(tile), self.tile, even
            return
        at, several = code.variable(code.whole(0)), self.form.several
        with code.repeat(lambda: at.get() < self.tiles):
            first, size = at.get(), code.variable(code.whole(1))
            at.set(first + 1)
            start = self.length(first) - 1
            if several is not None:
                with code.repeat(lambda: self._continues(first, at.get())):
                    at.set(at.get() + 1)
                with code.when(at.get() - first > 1):
                    share = self.share // self._spans(self.oldest(start), start + 1) + 1
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

    def _even(self, count: Value, limit: Value) -> Value:
        """The size of equal blocks, each of at most `limit`."""
        blocks = (count + limit - 1) // limit
        return (count + blocks - 1) // blocks

    def _continues(self, first: Value, row: Value) -> Value:
        """Whether a decode row belongs to the sequence of the rows [first, row), at the next position: all
        pages that it reads are theirs.
        """
        code, size = self.code, self.form.page_size
        out = code.variable(code.constant(I1, 0))
        with code.when(row < self.tiles):
            start, newest = self.length(first) - 1, self.length(row) - 1
            with code.when((start >= 0) & newest.equals(start + (row - first))):
                differ = code.variable(code.constant(I32, 0))
                mine, theirs = (self.tables + n * self.width * 4 for n in (row, first))
                with code.loop(self.oldest(start) // size, newest // size + 1) as n:
                    differ.set(differ.get() | (code.load(I32, mine + n * 4) ^ code.load(I32, theirs + n * 4)))
                out.set(differ.get().equals(0))
        return out.get()

    def _share(self, parts: Value) -> Value:
        """A thread's share of the work on decode rows, in blocks of tokens times rows. An item of several
        rows has at most about as much, so that no thread is idle because there are few sequences.
        """
        code = self.code
        total = code.variable(code.whole(0))
        with code.loop(0, self.tiles) as row:
            end = self.length(row)
            with code.when(end > 0):
                total.set(total.get() + self._spans(self.oldest(end - 1), end))
        return total.get() * self.kv_heads * PARTS // parts

    def length(self, tile: Value) -> Value:
        return self.code.load(I32, self.lengths + tile * 4).to(I64)

    def oldest(self, position: Value) -> Value:
        """The first token that a query attends to."""
        return self.windowed.choose((position + 1 - self.window).most(0), 0)

    def _spans(self, oldest: Value, end: Value) -> Value:
        """The approximate number of blocks in a range of tokens."""
        return (end - oldest) // SPAN + 2
