"""Who comes first: fcfs (by arrival) or priority (by Request.priority, then arrival).

One order serves both ends. The first of those waiting is admitted next; the last of those running is
preempted when pages run out, so the first always gets on. A preempted sequence keeps its place and so
stands before everyone of its class who has not run yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Literal

from jengine.request import Request
from jengine.scheduling.sequence import Sequence

Policy = Literal["fcfs", "priority"]
by_order = attrgetter("order")


def order_of(policy: Policy, request: Request, arrival: int) -> tuple[int, int]:
    """The place of the `arrival`-th request; smaller comes first."""
    return (request.priority if policy == "priority" else 0, arrival)


def victim(running: Iterable[Sequence]) -> Sequence:
    """Whom to preempt: the last under the policy."""
    return max(running, key=by_order)


class WaitingQueue:
    """Waiting sequences in order. A sorted list: moving ten thousand pointers takes microseconds."""

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
