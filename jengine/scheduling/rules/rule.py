"""Rules for decode rows."""

from __future__ import annotations

from jengine.scheduling.pages.blocks import BlockManager
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import PlanBuilder
from jengine.scheduling.step_plan import Span, Windows, further_work


class Rule:
    """A feature that gives some rows another meaning than one new token after the last one.

    A rule keeps what it knows about running sequences, and overrides the hooks that it needs. Each is called
    once in a step, with all of its rows, in the order of Scheduler's rules.
    """

    def lengthen(self, plan: PlanBuilder) -> None:
        """Rows are added and have their pages; programs are not chosen yet. May lengthen rows
        (see PlanBuilder.lengthened), with pages for all of their tokens."""

    def planned(self, plan: PlanBuilder) -> None:
        """Programs are chosen, and the rows' sequences advanced. May hold sequences, or drop samples."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence gives back its slot and its pages."""

    def check_integrity(self) -> None:
        """Raises AssertionError if the rule remembers something that is not so."""


def add_rows(plan: PlanBuilder, span: Span, tokens: list[int], blocks: BlockManager, windows: Windows) -> int:
    """Adds rows to a span for tokens behind its first one, as there are pages. Returns their number."""
    start = span.start + 1
    end = blocks.room(span.seq, start + len(tokens))
    if (count := end - start) <= 0:
        return 0
    plan.enter(span.slot, blocks.grow(span.seq, end))
    span.length, span.following = 1 + count, tokens[:count]
    plan.work = plan.work.plus(further_work(start, count, windows))
    plan.longest, plan.lengthened = max(plan.longest, end), True
    plan.more_rows += count
    return count
