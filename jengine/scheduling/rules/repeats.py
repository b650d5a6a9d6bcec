"""Generated tokens that rows compute again after a preemption, because tiles would not give the same bits."""

from __future__ import annotations

from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rules.rule import Rule
from jengine.scheduling.step.plan_builder import PlanBuilder


class Repeats(Rule):
    """Such rows read known tokens, and sample only after the last of these."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._repeating: dict[Sequence, None] = {}

    def begin(self, sequence: Sequence) -> None:
        """The prompt of a resumed sequence is computed; rows compute its other known tokens."""
        self._repeating[sequence] = None

    def planned(self, plan: PlanBuilder) -> None:
        """See Rule."""
        if not self._repeating:
            return
        for span, sequence in zip(plan.spans, plan.rows, strict=True):
            if sequence in self._repeating:
                span.known = sequence.tokens[span.start]
                if span.start + 1 == len(sequence.tokens):
                    del self._repeating[sequence]
                else:
                    sequence.in_flight -= 1
        left = [i for i, sequence in enumerate(plan.rows) if sequence not in self._repeating]
        plan.samples, plan.sampled = [plan.samples[i] for i in left], [plan.sampled[i] for i in left]

    def forget(self, sequence: Sequence) -> None:
        """See Rememberer."""
        self._repeating.pop(sequence, None)

    def check_integrity(self) -> None:
        """See Rule."""
        assert {*self._repeating} <= {*self._registry.running}, "a sequence that does not run repeats tokens"
