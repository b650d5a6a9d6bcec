"""Packs a StepPlan into one host buffer, for a single transfer, and unpacks it on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from jengine.execution.sampling_row import SAMPLING_WORDS, pack_sampling
from jengine.scheduling.step_plan import SlotReset, Span, StepPlan
from jengine.table.program_table import ProgramTable, TrunkKey

ENTRY_WORDS, RESET_WORDS = 4, 1 + SAMPLING_WORDS
AXES, TURNS = 3, 4  # of positions with mrope
NULL_STATES = [0, 0]  # for plans used only in measurements
Entry = tuple[int, int, int, int]  # see StepPlan.table


class Batch(NamedTuple):
    """A step's inputs, all int32. Padding uses slot 0, page 0 and length 0."""

    row_slots: jax.Array  # [rows]
    # [rows], of the token that the row reads, if the host knows that token; otherwise at least that
    row_positions: jax.Array
    # [rows], the token's id; -1: it is in the slot, with its position; -1 - n: the slot's n-th draft, n
    # positions later
    row_tokens: jax.Array
    row_states: jax.Array  # [rows, 2]: state pages to read and to write; [0, 2] for models without states
    tile_slots: jax.Array  # [tiles]
    tile_positions: jax.Array  # [tiles], of the first token
    tile_lengths: jax.Array  # [tiles], real tokens
    tile_states: jax.Array  # as row_states
    tile_tokens: jax.Array  # [tiles, tile_size]
    sample_tokens: jax.Array  # [samples], index on the token axis of the token before each sample
    sample_slots: jax.Array  # [samples]
    table: jax.Array  # [entries, ENTRY_WORDS]: cache group, slot, index in its block table, page
    resets: jax.Array  # [tiles, RESET_WORDS]: slot, then its sampling row
    row_turns: jax.Array  # [rows, TURNS], see Span: turns, then `after`; [0, TURNS] for models without mrope
    tile_turns: jax.Array  # [tiles, tile_size, AXES], or [0, tile_size, AXES]
    tile_ahead: jax.Array  # [tiles, tile_size], see Span; [0, tile_size] for models that see no later token


def batch_shapes(
    rows: int,
    tiles: int,
    tile_size: int,
    samples: int,
    entries: int,
    *,
    states: bool = False,
    turns: bool = False,
    ahead: bool = False,
) -> Batch:
    """The shape of each field. The last three as in `BatchLayout.of`."""
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("row_slots", "row_positions", "row_tokens"), (rows,)),
        "row_states": (rows * states, 2),
        **dict.fromkeys(("tile_slots", "tile_positions", "tile_lengths"), (tiles,)),
        "tile_states": (tiles * states, 2),
        "tile_tokens": (tiles, tile_size),
        **dict.fromkeys(("sample_tokens", "sample_slots"), (samples,)),
        "table": (entries, ENTRY_WORDS),
        "resets": (tiles, RESET_WORDS),
        "row_turns": (rows * turns, TURNS),
        "tile_turns": (tiles * turns, tile_size, AXES),
        "tile_ahead": (tiles * ahead, tile_size),
    }
    return Batch(**shapes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The offset of each field of a Batch in the buffer of one trunk program.

    Attributes:
        shapes: of the fields; offsets: where each begins.
    """

    table: ProgramTable
    key: TrunkKey
    shapes: Batch
    offsets: Batch
    size: int  # int32 words

    @classmethod
    def of(
        cls,
        key: TrunkKey,
        table: ProgramTable,
        *,
        page_size: int,
        groups: int,
        states: bool = False,
        turns: bool = False,
        ahead: bool = False,
    ) -> BatchLayout:
        """The buffer has room for the entries of rows that each enter a page, and of tiles that each begin
        and end in one.

        Args:
            groups: number of cache groups with block tables.
            states: whether the model has recurrent states.
            turns: whether images have positions of three numbers; ahead: whether their tokens see each other.
        """
        entries = groups * (key.rows + key.tiles * (table.tile_size // page_size + 1))
        sizes = key.rows, key.tiles, table.tile_size, table.sample_rows(key), entries
        shapes = batch_shapes(*sizes, states=states, turns=turns, ahead=ahead)
        ends = [0, *np.cumsum([math.prod(shape) for shape in shapes]).tolist()]
        return cls(table, key, shapes, Batch(*ends[:-1]), ends[-1])

    @property
    def entries(self) -> int:
        """Number of block table entries that fit."""
        return self.shapes.table[0]  # type: ignore[return-value]

    @property
    def states(self) -> bool:
        """Whether the model has recurrent states."""
        return bool(self.shapes.row_states[0] or self.shapes.tile_states[0])

    def pack(self, plan: StepPlan) -> np.ndarray:
        """int32 [size], a new buffer, since the last one may still be in transfer. Omits entries and resets
        that do not fit."""
        buffer = np.zeros(self.size, np.int32)
        at: Any = self.offsets
        placement, size, spans = self.table.place(plan.spans), self.table.tile_size, plan.spans
        rows, on_rows = placement.rows, spans[: placement.on_rows]
        slots, positions = [span.slot for span in on_rows], [span.start for span in on_rows]
        tokens, first = [span.known for span in on_rows], [*range(rows)]
        if rows > len(on_rows):
            slots, positions, tokens, first = _on_several_rows(on_rows)
        buffer[at.row_slots : at.row_slots + rows] = slots
        buffer[at.row_positions : at.row_positions + rows] = positions
        buffer[at.row_tokens : at.row_tokens + rows] = tokens
        if self.states:
            _fill(buffer, at.row_states, _states_of(on_rows))
        turns = self.shapes.row_turns[0] or self.shapes.tile_turns[0]
        if turns:
            _fill(buffer, at.row_turns, [row for span in on_rows for row in _row_turns(span)])
        # `first` is the index of each span's first token on the token axis
        for i, (number, offset, length) in enumerate(placement.tiles):
            span = spans[number]
            assert span.tokens is not None
            buffer[at.tile_slots + i] = span.slot
            buffer[at.tile_positions + i] = span.start + offset
            buffer[at.tile_lengths + i] = length
            if self.states and span.states is not None:
                _fill(buffer, at.tile_states + 2 * i, span.states[offset // size :][:2])
            start = at.tile_tokens + i * size
            buffer[start : start + length] = span.tokens[offset : offset + length]
            within = slice(offset, offset + length)
            if turns:
                span_turns = np.full((length, AXES), span.after) if span.turns is None else span.turns[within]
                _fill(buffer, at.tile_turns + i * size * AXES, span_turns)
            if self.shapes.tile_ahead[0] and span.ahead is not None:
                _fill(buffer, at.tile_ahead + i * size, span.ahead[within])
            if not offset:
                first.append(self.key.rows + i * size)
        samples = len(plan.samples)
        buffer[at.sample_tokens : at.sample_tokens + samples] = [
            first[sample.span] + sample.offset for sample in plan.samples
        ]
        buffer[at.sample_slots : at.sample_slots + samples] = [sample.slot for sample in plan.samples]
        _fill(buffer, at.table, plan.table[: self.entries])
        for i, reset in enumerate(plan.resets[: self.key.tiles]):
            _fill(buffer, at.resets + i * RESET_WORDS, pack_sampling(reset))
        return buffer

    def rest(self, plan: StepPlan) -> tuple[list[Entry], list[SlotReset]]:
        """Entries and resets of a plan that do not fit."""
        return plan.table[self.entries :], plan.resets[self.key.tiles :]

    def unpack(self, buffer: jax.Array) -> Batch:
        parts = zip(self.offsets, self.shapes, strict=True)
        return Batch(*(buffer[start : start + math.prod(shape)].reshape(shape) for start, shape in parts))


def _on_several_rows(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Slots, positions and tokens of all rows of spans, some of which have several, and the index of each
    span's first row."""
    slots, positions, tokens, first = list[int](), list[int](), list[int](), list[int]()
    for span in spans:
        following = span.following or ()
        first.append(len(slots))
        slots += [span.slot] * (1 + len(following))
        positions += range(span.start, span.start + 1 + len(following))
        tokens += (span.known, *following)
    return slots, positions, tokens, first


def _states_of(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The state pages of all rows of spans. A span without any is only measured, and has one row."""
    return [pages for span in spans for pages in pairwise(span.states or NULL_STATES)]


def _row_turns(span: Span) -> list[list[int]]:
    """For each row of a span, its turns and those of later steps of a burst, which lie behind the prompt."""
    if span.turns is None:
        return [[span.after] * TURNS] * (1 + len(span.following or ()))
    return [[*row, span.after] for row in span.turns.tolist()]


def _fill(buffer: np.ndarray, start: int, rows: object) -> None:
    flat = np.asarray(rows, np.int32).reshape(-1)
    buffer[start : start + flat.size] = flat
