"""A step plan under construction."""

from __future__ import annotations

from collections.abc import Iterable

from jengine.scheduling.block_table import Entry
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.step_plan import Sample, SlotReset, Span
from jengine.scheduling.work import NO_WORK


class Draft:
    """The lists of a StepPlan. `sampled` holds the sequences of `samples`, in the same order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.sampled: list[Sequence] = []
        self.resets: list[SlotReset] = []
        self.table: list[tuple[int, int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.work = NO_WORK

    def enter(self, slot: int, entries: Iterable[Entry]) -> None:
        """Updates a slot's block tables."""
        self.table += [(group, slot, index, page) for group, index, page in entries]
