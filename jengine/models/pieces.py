"""Which parts of a checkpoint's tensors fill which parts of a parameter, laid out for one device or for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from jengine.errors import ModelError
from jengine.model_config import ModelConfig


class Piece(NamedTuple):
    """Rows of a checkpoint's tensor, and the part of a parameter that they fill: `parameter[part]`, reshaped."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[int | slice, ...] = ()
    rows: slice | tuple[slice, ...] = slice(None)  # of several leading axes
    columns: slice = slice(None)
    transposed: bool = False  # [in, out] in the checkpoint; rows and columns are those of its transpose

    def grouped(self, ndim: int, group: int) -> Piece:
        """Of an array with one number for each group of a tensor's columns, for a parameter of so many axes."""

        def less(columns: slice) -> slice:
            ends = [0 if columns.start is None else columns.start, columns.stop]
            if any(end is not None and end % group for end in ends):
                raise ModelError(f"columns {ends} cut groups of {group}: take fewer devices", tensor=self.name)
            return slice(*(None if end is None else end // group for end in ends))

        whole = len(self.part) < ndim
        part = self.part if whole else (*self.part[:-1], less(cast(slice, self.part[-1])))
        return self._replace(part=part, columns=less(self.columns))


class Part(NamedTuple):
    """Rows that lie together in a checkpoint, and where they go: (which of them, part of the parameter)."""

    rows: int
    places: tuple[tuple[slice, tuple[int | slice, ...]], ...]


EVERY = slice(None)


def whole(rows: int, *place: int | slice) -> Part:
    """All rows to one place."""
    return Part(rows, ((slice(0, rows), place),))


def apart(names: Sequence[str], parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
    """A tensor [rows, *inputs] for each part."""
    named = zip(names, parts, strict=True)
    return tuple(Piece(name, (part.rows, *inputs), place, rows) for name, part in named for rows, place in part.places)


def stacked(name: str, parts: Sequence[Part], *inputs: int, transposed: bool = False) -> tuple[Piece, ...]:
    """One tensor that holds the rows of all parts, in order; [*inputs, rows] if transposed."""
    ends = list(accumulate(part.rows for part in parts))
    shape = (*inputs, ends[-1]) if transposed else (ends[-1], *inputs)
    return tuple(
        Piece(name, shape, place, slice(end - part.rows + rows.start, end - part.rows + rows.stop), transposed=transposed)
        for part, end in zip(parts, ends, strict=True)
        for rows, place in part.places
    )


def grouped(name: str, config: ModelConfig, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
    """One tensor that holds, for each kv head, the rows of its queries, then of its key and of its value."""
    dim, group = config.head_dim, config.group
    shape = (config.num_kv_heads * (group + 2) * dim, *inputs)
    pieces = []
    for part, (each, first) in zip(parts, ((group, 0), (1, group), (1, group + 1)), strict=True):
        for head, laid, row in heads(part, dim):
            start = dim * (head // each * (group + 2) + first + head % each)
            pieces.append(Piece(name, shape, (laid, slice(row, row + dim)), slice(start, start + dim)))
    return tuple(pieces)


def interleaved(part: Part, dim: int, rotary: int) -> Part:
    """Queries or keys of a checkpoint whose channels 2 i and 2 i + 1 turn together, of the first `rotary`. Here, i and i + rotary / 2 do;
    scores stay as they are, since queries and keys are reordered alike."""
    places: list[tuple[slice, tuple[int | slice, ...]]] = []
    for head, laid, row in heads(part, dim):
        start, half = head * dim, rotary // 2
        even, odd = slice(start, start + rotary, 2), slice(start + 1, start + rotary, 2)
        places += [(even, (laid, slice(row, row + half))), (odd, (laid, slice(row + half, row + rotary)))]
        if rotary < dim:
            places.append((slice(start + rotary, start + dim), (laid, slice(row + rotary, row + dim))))
    return Part(part.rows, tuple(places))


def heads(part: Part, dim: int) -> Iterator[tuple[int, int, int]]:
    """Of queries, keys or values: each head's index in the checkpoint, its laid kv head, and its first row there."""
    for rows, place in part.places:
        laid, where = cast(tuple[slice, slice], place)
        across = (where.stop - where.start) // dim
        for i in range((rows.stop - rows.start) // dim):
            yield rows.start // dim + i, laid.start + i // across * (laid.step or 1), where.start + i % across * dim


def qkv_parts(config: ModelConfig) -> tuple[Part, Part, Part]:
    """Rows of queries, of keys and of values, into a parameter [laid kv heads, (laid group + 2) * head_dim, ...]."""
    dim, kv_heads, copies = config.head_dim, config.num_kv_heads, config.kv_repeats
    k, v, end = (dim * (config.group_size_padded + i) for i in range(3))  # a kv head's rows: its queries, then k, then v

    def copied(where: slice) -> Part:
        every = slice(0, kv_heads * dim)
        return Part(kv_heads * dim, tuple((every, (slice(i, kv_heads * copies, copies), where)) for i in range(copies)))

    queries = tuple((rows, (laid, slice(0, (rows.stop - rows.start) // (laid.stop - laid.start)))) for rows, laid in _query_runs(config))
    return Part(config.num_heads * dim, queries), copied(slice(k, v)), copied(slice(v, end))


def by_heads(config: ModelConfig, piece: Piece) -> Iterator[Piece]:
    """A piece whose columns are the checkpoint's query heads, cut to fill a parameter [out, laid heads * head_dim]."""
    for columns, laid in _query_runs(config):
        start = laid.start * config.group_size_padded * config.head_dim
        yield piece._replace(part=(EVERY, slice(start, start + columns.stop - columns.start)), columns=columns)


def _query_runs(config: ModelConfig) -> Iterator[tuple[slice, slice]]:
    """Query channels of a checkpoint that lie together as laid out too, and the laid kv heads that they belong to."""
    if config.kv_repeats == 1:
        yield slice(0, config.num_heads * config.head_dim), slice(0, config.num_kv_heads)
        return
    for head in range(config.num_kv_heads):
        for copy in range(config.kv_repeats):
            first, last = (min((copy + i) * config.group_size_padded, config.group) for i in range(2))
            laid = head * config.kv_repeats + copy
            if first < last:
                yield slice(*((head * config.group + i) * config.head_dim for i in (first, last))), slice(laid, laid + 1)
