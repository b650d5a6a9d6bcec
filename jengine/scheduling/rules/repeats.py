"""Generated tokens that rows compute again after a preemption, because tiles would not give the same bits."""

from __future__ import annotations

from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.rules.rule import Rule, add_rows
from jengine.scheduling.step_plan import Sample


class Repeats(Rule):
    """Such rows read known tokens, and sample only after the last of these. Rows that would be padding take
    further tokens of the same sequence.

    Args:
        several: whether a sequence may have several rows of known tokens in a step. Each would need a
            recurrent state.
    """

    def __init__(self, registry: Registry, predictor: StepPredictor, *, several: bool) -> None:
        self._registry, self._blocks, self._windows = registry, registry.blocks, registry.limits.windows
        self._predictor, self._several = predictor, several
        self._repeating = dict[Sequence, None]()

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
                first, *further = sequence.tokens[span.start : span.start + 1 + max(padding, 0)]
                span.known, plan.lengthened = first, True
                padding -= add_rows(plan, span, further, self._blocks, self._windows)

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
