"""StepPlan -> one packed host buffer -> one transfer -> device pytree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from jengine.execution.sampling_row import SAMPLING_WORDS, pack_sampling
from jengine.program_table import TrunkKey
from jengine.scheduling.step_plan import StepPlan


class Batch(NamedTuple):
    """A step's inputs, all int32. Padding names slot 0, page 0, length 0."""

    row_slots: jax.Array  # [rows]
    row_positions: jax.Array  # [rows], of the token read
    tile_slots: jax.Array  # [tiles]
    tile_positions: jax.Array  # [tiles], of the first token
    tile_lengths: jax.Array  # [tiles], real tokens
    tile_samples: jax.Array  # [tiles], 1 where the next token is wanted
    tile_tokens: jax.Array  # [tiles, tile_size]
    page_updates: jax.Array  # [updates, 3]: slot, index in its row of the block table, page
    resets: jax.Array  # [tiles, 1 + SAMPLING_WORDS]: slot, then its sampling row


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each field of a Batch lies in the buffer of one trunk program."""

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int  # int32 words

    @classmethod
    def of(cls, key: TrunkKey, *, tile_size: int, page_size: int) -> BatchLayout:
        """A row opens at most one page a step, a tile at most tile_size / page_size + 1."""
        updates = key.rows + key.tiles * (tile_size // page_size + 1)
        rows, tiles = (key.rows,), (key.tiles,)
        shapes = (rows, rows, tiles, tiles, tiles, tiles, (key.tiles, tile_size), (updates, 3), (key.tiles, 1 + SAMPLING_WORDS))
        ends = np.cumsum([int(np.prod(s)) for s in shapes]).tolist()
        return cls(shapes, (0, *ends[:-1]), ends[-1])

    def pack(self, plan: StepPlan) -> np.ndarray:
        """int32 [size], a fresh buffer: the last one may still be in transfer."""
        buffer = np.zeros(self.size, np.int32)
        at = Batch(*self.offsets)  # type: ignore[arg-type]
        rows = len(plan.row_slots)
        buffer[at.row_slots : at.row_slots + rows] = plan.row_slots
        buffer[at.row_positions : at.row_positions + rows] = plan.row_positions
        tile_size = self.shapes[6][1]
        for i, tile in enumerate(plan.tiles):
            buffer[at.tile_slots + i] = tile.slot
            buffer[at.tile_positions + i] = tile.position
            buffer[at.tile_lengths + i] = len(tile.token_ids)
            buffer[at.tile_samples + i] = tile.samples
            start = at.tile_tokens + i * tile_size
            buffer[start : start + len(tile.token_ids)] = tile.token_ids
        if plan.page_updates:
            flat = np.asarray(plan.page_updates, np.int32).reshape(-1)
            buffer[at.page_updates : at.page_updates + flat.size] = flat
        for i, reset in enumerate(plan.resets):
            start = at.resets + i * (1 + SAMPLING_WORDS)
            buffer[start : start + 1 + SAMPLING_WORDS] = pack_sampling(reset)
        return buffer

    def unpack(self, buffer: jax.Array) -> Batch:
        parts = zip(self.offsets, self.shapes, strict=True)
        return Batch(*(buffer[start : start + int(np.prod(shape))].reshape(shape) for start, shape in parts))
