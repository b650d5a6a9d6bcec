"""Generated tokens that rows compute again after a preemption, because tiles would not give the same bits."""

from __future__ import annotations

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.requests.sequence_limits import SequenceLimits
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.step_plan import Sample, Span, further_work


class Repeats(Rule):
    """Such rows read known tokens, and sample only after the last of these. Rows that would be padding take
    further tokens of the same sequence.

    Args:
        several: whether a sequence may have several rows of known tokens in a step. Each would need a
            recurrent state.
    """

    def __init__(
        self, registry: Registry, limits: SequenceLimits, predictor: StepPredictor, *, several: bool
    ) -> None:
        self._registry, self._blocks, self._windows, self._predictor = (
            registry,
            registry.blocks,
            limits.windows,
            predictor,
        )
        self._several, self._repeating = several, dict[Sequence, None]()

    def begin(self, sequence: Sequence) -> None:
        """The prompt of a resumed sequence is computed; rows compute its other known tokens."""
        self._repeating[sequence] = None

    def lengthen(self, plan: PlanBuilder) -> None:
        if not self._repeating or not plan.rows:
            return
        rows, pages = len(plan.rows) + plan.more_rows, self._blocks.pages_of(plan.longest)
        padding = self._predictor.ready.trunk(rows, plan.tiles, pages).rows - rows
        padding = min(padding, self._predictor.room(rows, plan.tiles)) if self._several else 0
        for span, sequence in zip(plan.spans, plan.rows, strict=False):
            if sequence in self._repeating:
                span.known, plan.lengthened = sequence.tokens[span.start], True
                padding -= self._add_tokens(plan, span, sequence, padding)

    def _add_tokens(self, plan: PlanBuilder, span: Span, sequence: Sequence, limit: int) -> int:
        """Adds rows for known tokens to a span, as pages and `limit` allow. Returns their number."""
        start = span.start + 1
        end = self._blocks.room(span.seq, min(start + limit, len(sequence.tokens)))
        if end <= start:
            return 0
        plan.enter(span.slot, self._blocks.grow(span.seq, end))
        span.length, span.following = end - span.start, sequence.tokens[start:end]
        context, longest = further_work(start, end - start, self._windows)
        plan.work = plan.work._replace(
            context=plan.work.context + context, longest=max(plan.work.longest, longest)
        )
        plan.longest, plan.more_rows = max(plan.longest, end), plan.more_rows + end - start
        return end - start

    def planned(self, plan: PlanBuilder) -> None:
        if not self._repeating:
            return
        ended: dict[int, Sample] = {}  # by sequence, what follows its last known token
        for i, (span, sequence) in enumerate(zip(plan.spans, plan.rows, strict=False)):
            if sequence in self._repeating:
                if span.start + span.length == len(sequence.tokens):
                    del self._repeating[sequence]
                    ended[span.seq] = Sample(i, span.length - 1, span.seq, span.slot)
                else:
                    sequence.in_flight -= 1
        left = {sequence.number for sequence in self._repeating}
        plan.samples = [ended.get(sample.seq, sample) for sample in plan.samples if sample.seq not in left]
        plan.sampled = [sequence for sequence in plan.sampled if sequence.number not in left]

    def forget(self, sequence: Sequence) -> None:
        self._repeating.pop(sequence, None)

    def check_integrity(self) -> None:
        assert {*self._repeating} <= {*self._registry.running}, "a sequence that does not run repeats tokens"
