"""Speculation: rows that verify drafts of the tokens after a sequence's last one."""

from __future__ import annotations

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.step.plan_builder import PlanBuilder
from jengine.scheduling.step_plan import Sample, Span
from jengine.scheduling.work import rows_work
from jengine.table.program_table import MOST_DRAFTS


class Speculation(Rule):
    """Gives each draft a row behind its sequence's last token. A draft counts if it is what the row before it
    samples, so tokens are those of an engine without drafts.

    A sequence gets drafts only if all of its tokens are known, so the caller must first read the steps in
    flight; see `awaited`.

    Args:
        drafter: None: no drafts.

    Attributes:
        most: maximum number of drafts of a sequence in a step.
        drafts: number of spans with drafts that were collected.
        tokens: of drafts, in these spans.
        accepted: those that counted, by position behind the sequence's last token.
    """

    def __init__(
        self, registry: Registry, limits: SequenceLimits, predictor: StepPredictor, drafter: Drafter | None
    ) -> None:
        self._registry, self._blocks, self._windows = registry, registry.blocks, limits.windows
        self._predictor = predictor
        # recurrent layers would have to take back what they have made of a wrong draft
        self._drafter = None if limits.recurrent else drafter
        self.most = MOST_DRAFTS if drafter is None else min(drafter.most, MOST_DRAFTS)
        self.drafts = self.tokens = 0
        self.accepted = [0] * MOST_DRAFTS

    def forget(self, sequence: Sequence) -> None:
        """See Rememberer."""
        if self._drafter is not None:
            self._drafter.forget(sequence)

    @property
    def awaited(self) -> bool:
        """Whether to read the steps in flight before the next one is planned.

        If drafts are in flight, since they determine the next rows; and if there may be drafts behind the
        token in flight: then known tokens suggest at least two more.
        """
        drafter = self._drafter
        if drafter is None:
            return False
        return any(
            sequence.tentative or (self._may_have(sequence) and len(drafter.draft(sequence, 2)) > 1)
            for sequence in self._registry.running
            if sequence.in_flight and sequence.state is State.DECODING
        )

    def _may_have(self, sequence: Sequence) -> bool:
        return not sequence.searches and len(sequence.tokens) >= sequence.prompt_len

    def lengthen(self, plan: PlanBuilder) -> None:
        """See Rule."""
        if self._drafter is None or not plan.rows:
            return
        # prompts of the step have samples too; programs with the most rows hold as many samples
        rows, found = len(plan.rows) + plan.more_rows, False
        room = min(
            self._predictor.ready.max_rows - max(rows, len(plan.samples)),
            self._predictor.room(rows, plan.tiles),
        )
        for span, sequence in zip(plan.spans, plan.rows, strict=False):
            # the last possible token is never an input
            most = min(self.most, room, sequence.last_position - 1 - span.start)
            if most <= 0 or sequence.in_flight or span.following or not self._may_have(sequence):
                continue
            if len(sequence.tokens) != span.start + 1:  # it computes known tokens again
                continue
            if drafts := self._drafter.draft(sequence, most)[:most]:
                room -= self._add(plan, span, drafts)
                found = found or span.guesses > 0
        if found:
            self._add_samples(plan)

    def _add(self, plan: PlanBuilder, span: Span, drafts: list[int]) -> int:
        """Adds rows for drafts, as many as there are pages. Returns their number."""
        start = span.start + 1
        end = self._blocks.room(span.seq, start + len(drafts))
        if end <= start:
            return 0
        plan.enter(span.slot, self._blocks.grow(span.seq, end))
        span.guesses = end - start
        span.length, span.following = 1 + span.guesses, drafts[: span.guesses]
        context, longest = rows_work(range(start, end), self._windows)
        plan.work = plan.work._replace(
            context=plan.work.context + context, longest=max(plan.work.longest, longest)
        )
        plan.longest, plan.lengthened = max(plan.longest, end), True
        plan.more_rows += span.guesses
        plan.guesses += span.guesses
        return span.guesses

    def _add_samples(self, plan: PlanBuilder) -> None:
        """Each row of a draft has a sample, behind that of its sequence's last token."""
        first, samples = len(plan.rows), list[Sample]()
        for sample in plan.samples:
            samples.append(sample)
            if sample.span < first and (guesses := plan.spans[sample.span].guesses):
                samples += [
                    Sample(sample.span, offset, sample.seq, sample.slot) for offset in range(1, guesses + 1)
                ]
        plan.samples = samples

    def note(self, drafts: int, accepted: int) -> None:
        """Records how many of a span's drafts have counted."""
        self.drafts += 1
        self.tokens += drafts
        for position in range(accepted):
            self.accepted[position] += 1
