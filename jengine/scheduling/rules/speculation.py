"""Speculation: rows that verify drafts of the tokens after a sequence's last one."""

from __future__ import annotations

import math
from collections.abc import Sequence as List

from jengine.scheduling.costs.draft_costs import DraftCosts, HowMany, Likely, Offer, Rows
from jengine.scheduling.costs.predictor import StepPredictor
from jengine.scheduling.drafters.choice import BestDraft
from jengine.scheduling.drafters.drafter import Drafter
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence, State
from jengine.scheduling.rows import PlanBuilder, Timeline
from jengine.scheduling.rules.rule import Rule, add_rows
from jengine.scheduling.step_plan import Sample, Span
from jengine.table.program_table import MOST_DRAFTS, MOST_STATES

GAIN = 0.03  # weight of a step in the mean gain


class Speculation(Rule):
    """Gives drafts rows behind their sequences' last tokens, as many as pay. A draft counts if it is what the
    row before it samples, so tokens are those of an engine without drafts.

    A sequence gets drafts only if all of its tokens are known, so the caller must first read the steps in
    flight; see `awaited`.

    Args:
        timeline: the predicted start of steps.
        drafters: what proposes drafts; empty: there are none.
        how_many: decides how many drafts a step verifies.

    Attributes:
        max_drafts: maximum number of drafts of a sequence in a step.
        drafts: number of spans with drafts that were collected.
        tokens: of drafts, in these spans.
        right: those that counted.
        accepted: the same, by position behind the sequence's last token.
        gain: expected tokens a second of decode steps relative to those without drafts, lately.
    """

    def __init__(
        self,
        registry: Registry,
        predictor: StepPredictor,
        timeline: Timeline,
        drafters: List[Drafter],
        how_many: HowMany,
    ) -> None:
        self._registry, self._blocks, self._windows = registry, registry.blocks, registry.limits.windows
        self._timeline, self._costs = timeline, DraftCosts(predictor, self._windows, how_many)
        self._drafter = BestDraft(drafters) if drafters else None
        limit = MOST_STATES if registry.limits.recurrent else MOST_DRAFTS
        self.max_drafts = limit if self._drafter is None else min(self._drafter.max_drafts, limit)
        self.drafts = self.tokens = self.right = 0
        self.accepted = [0] * MOST_DRAFTS
        self.gain = 1.0

    def forget(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            self._drafter.forget(sequence)

    @property
    def drafting(self) -> bool:
        """Whether steps may have drafts."""
        return self._drafter is not None

    @property
    def awaited(self) -> bool:
        """Whether to read the steps in flight before the next one is planned.

        If drafts are in flight, since they determine the next rows; and if there may be drafts behind the
        token in flight that pay although the device waits for the host.
        """
        if self._drafter is None:
            return False
        decoding = [s for s in self._registry.running if s.state is State.DECODING]
        if not any([s.in_flight for s in decoding]):
            return False
        if any([s.tentative for s in decoding]):
            return True
        rows = Rows.of([s for s in decoding if s.num_computed < s.last_position], self._windows)
        offer = self._with_states(self._costs.offer_while_in_flight(rows))
        if not self._costs.could_pay(offer):
            return False
        likely = [self._likely(s, s.in_flight) for s in decoding if not s.searches and s.in_flight < 2]
        return any(self._counts(offer, [drafts for drafts in likely if drafts is not None]))

    def lengthen(self, plan: PlanBuilder) -> None:
        if self._drafter is not None and plan.rows:
            self._costs.expected = 1.0
            if not all([sequence.in_flight for sequence in plan.rows]):
                self._draft(plan)
            self.gain += GAIN * (self._costs.expected - self.gain)

    def _draft(self, plan: PlanBuilder) -> None:
        """Gives the likeliest drafts rows."""
        limit = math.inf
        if plan.paced:
            limit = min([sequence.due for sequence in plan.rows]) - self._timeline.start(plan.now)
        # prompts of the step have samples too; programs with the most rows hold as many samples
        taken = max(len(plan.rows) + plan.more_rows, len(plan.samples))
        rows = Rows(len(plan.rows), taken, plan.longest, plan.rank, plan.work)
        offer = self._with_states(self._costs.offer(rows, plan.tiles, limit))
        if not self._costs.could_pay(offer):
            return
        spans, likely = list[Span](), list[Likely]()
        for span, sequence in zip(plan.spans, plan.rows, strict=False):
            if sequence.in_flight or span.following or sequence.searches:
                continue
            if span.known >= 0 or len(sequence.tokens) != span.start + 1:  # it computes known tokens again
                continue
            if (drafts := self._likely(sequence)) is not None:
                spans.append(span)
                likely.append(drafts)
        for span, drafts_of_span, count in zip(spans, likely, self._counts(offer, likely), strict=True):
            if count:
                tokens = drafts_of_span.tokens[:count]
                span.guesses = add_rows(plan, span, tokens, self._blocks, self._windows)
                plan.guesses += span.guesses
        if plan.guesses:
            self._add_samples(plan)

    def _with_states(self, offer: Offer) -> Offer:
        """Each draft needs a recurrent state, if the model has any."""
        if (states := self._blocks.states) is None:
            return offer
        spare = len(states.spare)
        return offer._replace(buckets=[b._replace(drafts=min(b.drafts, spare)) for b in offer.buckets])

    def _counts(self, offer: Offer, likely: list[Likely]) -> list[int]:
        """How many drafts of each sequence to verify."""
        assert self._drafter is not None
        counts = self._costs.counts(offer, likely)
        tried = [count > 0 for count, drafts in zip(counts, likely, strict=True) if drafts.proposed]
        if tried and not any(tried):
            self._drafter.rates.miss("model")
        return counts

    def _likely(self, sequence: Sequence, skipped: int = 0) -> Likely | None:
        """Drafts of a sequence after `skipped` tokens in flight; known drafts are the first of them."""
        assert self._drafter is not None
        draft = self._drafter.draft(sequence)
        start = len(sequence.tokens) + skipped
        skipped = 0 if draft is None or draft.proposed else skipped
        # the last possible token is never an input
        limit = min(self.max_drafts, sequence.last_position - start)
        if draft is None or limit <= 0 or len(draft.tokens) <= skipped:
            return None
        chances = self._drafter.rates.chances(draft)
        return Likely(start, draft.tokens[skipped : skipped + limit], chances[skipped : skipped + limit])

    # --- rows -----------------------------------------------------------------------------------------

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

    def note(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Records how many of a sequence's drafts in a step have counted, before it gets its tokens."""
        assert self._drafter is not None
        self._drafter.verified(sequence, drafts, accepted)
        self.drafts += 1
        self.tokens += drafts
        self.right += accepted
        for position in range(accepted):
            self.accepted[position] += 1
