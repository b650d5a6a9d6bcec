"""Rules for decode rows."""

from __future__ import annotations

from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.rows import PlanBuilder


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
