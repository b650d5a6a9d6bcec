"""Who comes first: fcfs (by arrival), priority (by Request.priority, then arrival) or fair (see fair_shares.py).

One order serves both ends. The first of those waiting is admitted next; the last of those running is
preempted when pages run out, so the first always gets on. A preempted sequence keeps its place and so
stands before everyone of its class who has not run yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Protocol

from jengine.scheduling.options import Policy
from jengine.scheduling.sequence import Order, Sequence

by_order = attrgetter("order")
NO_DEADLINE = 1e6  # seconds after its arrival at which a request without a target counts as due: behind all that have one


def order_of(sequence: Sequence, policy: Policy, ageing: float, by_slack: bool = False, promised: bool = True) -> Order:
    """Its place; smaller comes first.

    Where waiting counts, a level of priority is worth `ageing` seconds of it: of two requests, the one with the lower sum of
    priority * ageing and arrival (or, by slack, of the time by which it must start) comes first. That sum does not change while they
    wait, so each request is overtaken only by those that arrive within a bounded time after it. A request that is late already counts as
    one level lower.

    Args:
        ageing: seconds; 0: priorities are strict.
        by_slack: requests of one priority are ordered by when they must start to meet their target, not by arrival.
        promised: it comes before all that nothing was promised to.
    """
    level = (sequence.request.priority if policy == "priority" else 0) + sequence.late
    when = (min(sequence.start_by, sequence.arrival + NO_DEADLINE)) if by_slack else sequence.arrival
    if ageing and (by_slack or policy == "priority"):
        return not promised, 0, when + level * ageing, sequence.number
    return not promised, level, when if by_slack else 0.0, sequence.number


def victim(running: Iterable[Sequence]) -> Sequence:
    """Whom to preempt: the last under the policy."""
    return max(running, key=by_order)


class Waiting(Protocol):
    """Waiting sequences, iterated over in the order in which they would be admitted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    @property
    def first(self) -> Sequence | None: ...

    def push(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it does not wait here."""

    def admit(self, sequence: Sequence) -> None:
        """Removes one that runs from now on."""


class WaitingQueue:
    """Waiting sequences by their order. A sorted list: moving ten thousand pointers takes microseconds."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_order)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError if it does not wait here."""
        at = bisect_left(self._sequences, sequence.order, key=by_order)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not waiting")
        del self._sequences[at]

    def admit(self, sequence: Sequence) -> None:
        """Removes one that runs from now on."""
        self.remove(sequence)
