"""Bursts: several decode steps in a row that do not need the host. Decides when to run one, and its length per row."""

from __future__ import annotations

from jengine.scheduling.beam_searches import BeamSearches
from jengine.scheduling.draft import Draft
from jengine.scheduling.sequence import Sequence
from jengine.scheduling.work import Work
from jengine.table.program_table import VARIANTS


class Bursts(BeamSearches):
    """Sequences, and the decode steps that become bursts."""

    def _lengthen(self, draft: Draft, rows: list[Sequence], tokens: int) -> int:
        """Turns a decode step into a burst, if its program is ready, no row needs the host, and there are enough pages.

        With num_scheduler_steps="auto", also requires that nothing is waiting.

        Args:
            tokens: length of the longest sequence.

        Returns:
            The number of steps.
        """
        steps, blocks = self.table.steps, self.blocks
        rank = max([sequence.variant_rank for sequence in rows])
        if VARIANTS[rank] == VARIANTS[-1] or (self.options.num_scheduler_steps == "auto" and (self.num_waiting or self.fetching)):
            return 1
        lengths = [min(steps, s.last_position - s.num_computed) for s in rows]
        if max(lengths) < steps:
            return 1
        trunk = self.ready.trunk(len(rows), 0, self._most_pages(tokens, steps), len(rows))
        if self.ready.burst(trunk, VARIANTS[rank]) is None:
            return 1
        ends = [s.num_computed + length for s, length in zip(rows, lengths, strict=True)]
        growing = [(s, end) for s, end in zip(rows, ends, strict=True) if blocks.pages_of(end) > blocks.pages_of(s.num_computed + 1)]
        for sequence, _ in growing:
            blocks.pass_windows(sequence.number, sequence.num_computed)
        wanted = sum([blocks.pages_of(end) - blocks.pages_of(s.num_computed + 1) for s, end in growing])
        if not blocks.available(blocks.new_pages(wanted)):
            return 1
        for sequence, end in growing:
            draft.enter(sequence.slot, blocks.grow(sequence.number, end))
        for span, length in zip(draft.spans, lengths, strict=True):
            span.length = length
        work = draft.work
        draft.work = Work(work.context * steps + len(rows) * steps * (steps - 1) // 2, (work.longest + steps // 2) * steps)
        return steps

    def _most_pages(self, tokens: int, steps: int) -> int:
        """Pages of the longest sequence after this many steps, or at its end if that comes first."""
        return self.blocks.pages_of(min(tokens + steps - 1, self.sequence.max_model_len))
