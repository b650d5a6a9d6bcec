"""Maps parts of checkpoint tensors to parts of parameters, for the parameters' layout on one or several
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import jax

from jengine.base.errors import ModelError
from jengine.models.config import ModelConfig


class Piece(NamedTuple):
    """Rows of a checkpoint tensor, and the part of a parameter that they fill: `parameter[part]`, after a
    reshape.
    """

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    part: tuple[int | slice, ...] = ()
    rows: slice | tuple[slice, ...] = slice(None)  # a tuple slices several leading axes
    columns: slice = slice(None)
    transposed: bool = False  # stored as [in, out]; rows and columns refer to the transpose
    either: bool = False  # if transposed: some checkpoints have [out, in]; so do those where both shapes fit

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """The shape with the last two axes swapped."""
        return (*self.shape[:-2], *self.shape[:-3:-1])

    @property
    def as_stored(self) -> bool:
        """Whether it is the whole checkpoint tensor, in its own layout."""
        return self.rows == self.columns == slice(None) and not self.transposed

    def of(self, tensor: Any) -> Any:
        """Its part of the checkpoint's tensor, an array of NumPy or JAX."""
        turned = tensor.swapaxes(-1, -2) if self.transposed and tensor.ndim > 1 else tensor
        return turned[self.rows][..., self.columns]

    def grouped(self, ndim: int, group: int) -> Piece:
        """This piece of an array with one number per group of columns, such as scales.

        Args:
            ndim: number of axes of the parameter.
            group: columns per group.
        """

        def less(columns: slice) -> slice:
            ends = [0 if columns.start is None else columns.start, columns.stop]
            if any(end is not None and end % group for end in ends):
                raise ModelError(
                    f"columns {ends} split quantization groups of {group}; use fewer devices",
                    tensor=self.name,
                )
            return slice(*(None if end is None else end // group for end in ends))

        whole = len(self.part) < ndim
        part = self.part if whole else (*self.part[:-1], less(cast(slice, self.part[-1])))
        return self._replace(part=part, columns=less(self.columns))


def pieces_of(sources: Any) -> list[Piece]:
    """All pieces in a tree of parameters' sources."""
    pieces: list[Piece] = jax.tree.leaves(sources, is_leaf=lambda node: isinstance(node, Piece))
    return pieces


class Part(NamedTuple):
    """Consecutive rows of a checkpoint, and their places: pairs of (some of the rows, part of the
    parameter).
    """

    rows: int
    places: tuple[tuple[slice, tuple[int | slice, ...]], ...]


EVERY = slice(None)


def apart(names: Sequence[str], parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
    """The pieces if the checkpoint has one tensor [rows, *inputs] per part."""
    named = zip(names, parts, strict=True)
    return tuple(
        Piece(name, (part.rows, *inputs), place, rows) for name, part in named for rows, place in part.places
    )


def stacked(name: str, parts: Sequence[Part], *inputs: int, transposed: bool = False) -> tuple[Piece, ...]:
    """The pieces if one tensor [rows, *inputs] holds the rows of all parts, in order; [*inputs, rows] if
    transposed.
    """
    ends = list(accumulate(part.rows for part in parts))
    shape = (*inputs, ends[-1]) if transposed else (ends[-1], *inputs)
    return tuple(
        Piece(
            name,
            shape,
            place,
            slice(end - part.rows + rows.start, end - part.rows + rows.stop),
            transposed=transposed,
        )
        for part, end in zip(parts, ends, strict=True)
        for rows, place in part.places
    )


def grouped(name: str, config: ModelConfig, parts: Sequence[Part], *inputs: int) -> tuple[Piece, ...]:
    """The pieces if one tensor holds, for each kv head, the rows of its queries, then of its key and its
    value.
    """
    dim, group = config.head_dim, config.group
    shape = (config.num_kv_heads * (group + 2) * dim, *inputs)
    pieces = []
    for part, (each, first) in zip(parts, ((group, 0), (1, group), (1, group + 1)), strict=True):
        for head, laid, row in heads(part, dim):
            start = dim * (head // each * (group + 2) + first + head % each)
            pieces.append(Piece(name, shape, (laid, slice(row, row + dim)), slice(start, start + dim)))
    return tuple(pieces)


def interleaved(part: Part, dim: int, rotary: int) -> Part:
    """Reorders queries or keys of a checkpoint in which channels 2 i and 2 i + 1 of the first `rotary` rotate
    together.

    Here channels i and i + rotary / 2 rotate together. Scores do not change, because queries and keys are
    reordered alike.
    """
    places: list[tuple[slice, tuple[int | slice, ...]]] = []
    for head, laid, row in heads(part, dim):
        start, half = head * dim, rotary // 2
        even, odd = slice(start, start + rotary, 2), slice(start + 1, start + rotary, 2)
        places += [(even, (laid, slice(row, row + half))), (odd, (laid, slice(row + half, row + rotary)))]
        if rotary < dim:
            places.append((slice(start + rotary, start + dim), (laid, slice(row + rotary, row + dim))))
    return Part(part.rows, tuple(places))


def heads(part: Part, dim: int) -> Iterator[tuple[int, int, int]]:
    """For each head of queries, keys or values: its index in the checkpoint, its kv head in the layout, and
    its first row there.
    """
    for rows, place in part.places:
        laid, where = cast(tuple[slice, slice], place)
        across = (where.stop - where.start) // dim
        for i in range((rows.stop - rows.start) // dim):
            yield (
                rows.start // dim + i,
                laid.start + i // across * (laid.step or 1),
                where.start + i % across * dim,
            )


def qkv_parts(config: ModelConfig) -> tuple[Part, Part, Part]:
    """The parts of queries, keys and values, for a parameter [padded kv heads, (padded group + 2) * head_dim,
    ...].
    """
    dim, kv_heads, copies = config.head_dim, config.num_kv_heads, config.kv_repeats
    # a kv head's rows: its queries, then k, then v
    k, v, end = (dim * (config.group_size_padded + i) for i in range(3))

    def copied(where: slice) -> Part:
        every = slice(0, kv_heads * dim)
        return Part(
            kv_heads * dim,
            tuple((every, (slice(i, kv_heads * copies, copies), where)) for i in range(copies)),
        )

    queries = tuple(
        (rows, (laid, slice(0, (rows.stop - rows.start) // (laid.stop - laid.start))))
        for rows, laid in _query_runs(config)
    )
    return Part(config.num_heads * dim, queries), copied(slice(k, v)), copied(slice(v, end))


def by_heads(config: ModelConfig, piece: Piece) -> Iterator[Piece]:
    """Splits a piece whose columns are the checkpoint's query heads to fill a parameter [out, padded heads *
    head_dim].
    """
    for columns, laid in _query_runs(config):
        start = laid.start * config.group_size_padded * config.head_dim
        yield piece._replace(
            part=(EVERY, slice(start, start + columns.stop - columns.start)), columns=columns
        )


def _query_runs(config: ModelConfig) -> Iterator[tuple[slice, slice]]:
    """Runs of query channels that are consecutive in the checkpoint and in the layout, with their kv heads in
    the layout.
    """
    if config.kv_repeats == 1:
        yield slice(0, config.num_heads * config.head_dim), slice(0, config.num_kv_heads)
        return
    for head in range(config.num_kv_heads):
        for copy in range(config.kv_repeats):
            first, last = (min((copy + i) * config.group_size_padded, config.group) for i in range(2))
            laid = head * config.kv_repeats + copy
            if first < last:
                yield (
                    slice(*((head * config.group + i) * config.head_dim for i in (first, last))),
                    slice(laid, laid + 1),
                )
