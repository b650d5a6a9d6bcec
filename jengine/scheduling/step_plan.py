"""What one step runs: the only thing that passes from scheduling to execution. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jengine.program_table import SamplerKey, TrunkKey
from jengine.request import SamplingParams


@dataclass(slots=True)
class SlotReset:
    """A sequence takes a slot: its sampling state is written there before the step runs."""

    slot: int
    params: SamplingParams
    seed: int  # the request's, or the one drawn for it
    sample_index: int
    prompt_len: int  # tokens, for min_tokens
    stop_token_ids: tuple[int, ...]  # end-of-sequence ids included, whether or not they end the request
    counted: list[int] | None = None  # all known tokens, where penalties need them counted


@dataclass(slots=True)
class Tile:
    """Up to tile_size consecutive tokens of one sequence's prompt (or of what it recomputes)."""

    slot: int
    position: int  # of the first token
    token_ids: list[int]
    samples: bool  # ends the known tokens, so the next one is sampled
    scored: tuple[Any, list[int]] | None = None  # the sequence, and which tokens follow these, where prompt_logprobs wants them


@dataclass(slots=True)
class StepPlan:
    """Lists run in parallel: row i decodes `row_slots[i]` at `row_positions[i]`.

    A row's input token is on the device, in its slot. `sampled` names, in the sampler's row order, who
    gets each token: `(sampler row, sequence)`; the sequence is opaque to execution.
    """

    trunk: TrunkKey
    sampler: SamplerKey
    row_slots: list[int] = field(default_factory=list)
    row_positions: list[int] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    resets: list[SlotReset] = field(default_factory=list)
    page_updates: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, index in its row of the table, page)
    sampled: list[tuple[int, Any]] = field(default_factory=list)
