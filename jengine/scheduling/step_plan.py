"""What one step runs: the only thing that passes from scheduling to execution. Plain values, which other processes can be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from jengine.request import SamplingParams
from jengine.scheduling.work import NO_WORK, Work
from jengine.table.program_table import BurstKey, SamplerKey, TrunkKey


class Span(msgspec.Struct, gc=False):
    """Consecutive tokens of one sequence that a step computes.

    Attributes:
        seq: the sequence's number.
        start: position of the first token.
        length: tokens. Of a burst's row, those that it reads: the first is in the slot, the others come of the burst itself.
        tokens: their ids; None: there is one, in a decode row, which the step before has left in the slot, on the device.
        targets: the tokens that follow these, where their log probabilities are asked for.
        pool: from this offset on, tokens' hidden states are summed, for an embedding; None: of none.
        known: of a decode row, the id of its token where that is not in the slot, since the row repeats an earlier one or the host chose
            it; else -1.
        states: of a model with recurrent states, the page that the first of its tiles reads, then the one that each of them writes, which
            the next one reads. A row is as one tile.
    """

    seq: int
    slot: int
    start: int
    length: int = 1
    tokens: list[int] | None = None
    targets: list[int] | None = None
    pool: int | None = None
    known: int = -1
    states: list[int] | None = None


class Sample(msgspec.Struct, gc=False):
    """A token to sample: after the token at `offset` of a span, for a sequence and into its slot. Several may follow one token."""

    span: int
    offset: int
    seq: int
    slot: int


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
class StepPlan:
    """A step, in the order in which it is done: resets, block table entries, page copies; then the trunk; then the sampler.

    Attributes:
        spans: those with their token on the device come first.
        samples: in the sampler's row order.
        table: (cache group, slot, index in its block table, page).
        copies: (pool, source page, target page).
        work: what its seconds depend on beside its programs.
        steps: decode steps in a row, of a burst: spans are rows, of which each takes part in its first `length` steps.
        seconds: of the device, as predicted; 0 where that was not asked.
    """

    trunk: TrunkKey
    sampler: SamplerKey
    spans: list[Span] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    resets: list[SlotReset] = field(default_factory=list)
    table: list[tuple[int, int, int, int]] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    work: Work = NO_WORK
    steps: int = 1
    seconds: float = 0.0

    @property
    def burst(self) -> BurstKey:
        """The program of a burst."""
        return BurstKey(self.trunk, self.sampler, self.steps)


class Swaps(msgspec.Struct, gc=False):
    """Pages that move between the device and the host, in this order, and before the step that was planned with them.

    Attributes:
        spills: (pool, page, host page) that are copied to the host.
        fills: (pool, place, page): what was staged in a place on the device is put into a page.
        fetches: (host page, place) that are staged from now on, beside the steps.
    """

    spills: list[tuple[int, int, int]] = []
    fills: list[tuple[int, int, int]] = []
    fetches: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self.spills or self.fills or self.fetches)
