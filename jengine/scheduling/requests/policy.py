"""Request order: fcfs (by arrival), priority (by Request.priority, then arrival) or fair (see FairShares).

One order serves admission and preemption. The first waiting sequence is admitted next. When pages run out,
the last running sequence is preempted, so the first always advances. A preempted sequence keeps its place in
the order, ahead of all sequences of its class that have not run yet.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from jengine.scheduling.requests.sequence import Sequence

# idle clients whose virtual time is kept; beyond that, the half that was served least is forgotten
REMEMBERED = 4096


by_order = attrgetter("order")
# seconds after arrival at which a request without a target counts as due, so it comes after all requests with
# targets
NO_DEADLINE = 1e6


def victim(running: Iterable[Sequence]) -> Sequence:
    """The sequence to preempt: the last in the order."""
    return max(running, key=by_order)


class WaitingQueue:
    """Waiting sequences in a sorted list, in admission order. Moving ten thousand pointers takes
    microseconds.
    """

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
        """Raises ValueError if the sequence is not waiting here."""
        at = bisect_left(self._sequences, sequence.order, key=by_order)
        if at == len(self._sequences) or self._sequences[at] is not sequence:
            raise ValueError(f"request {sequence.request_id!r} is not waiting")
        del self._sequences[at]

    admit = remove  # only a FairQueue charges clients


class FairQueue:
    """Waiting sequences: clients ordered by virtual time, and each client's sequences by their order.

    Attributes:
        served: virtual time of each client, in tokens.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self._now = 0.0  # virtual time of the last admitted client before that admission
        self._queues: dict[str, WaitingQueue] = {}  # of clients with waiting sequences
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """The order of admission if nothing arrives and no output is computed meanwhile."""
        if len(self._queues) == 1:
            [only] = self._queues.values()
            yield from only
            return
        heap = []
        for client, queue in self._queues.items():
            rest = iter(queue)
            first = next(rest)
            heap.append((first.order[0], self.served[client], first.order, first, rest))
        heapq.heapify(heap)
        while heap:
            _, served, _, sequence, rest = heap[0]
            yield sequence
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(
                    heap, (following.order[0], served + charge(sequence), following.order, following, rest)
                )

    @property
    def first(self) -> Sequence | None:
        return next(iter(self), None)

    def push(self, sequence: Sequence) -> None:
        client = sequence.client
        if client not in self._queues:
            self._queues[client] = WaitingQueue()
            self.served[client] = max(self.served.get(client, 0.0), self._now)
            self._forget()
        self._queues[client].push(sequence)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self._queues.get(sequence.client, WaitingQueue())  # an empty one raises
        queue.remove(sequence)
        self._length -= 1
        if not len(queue):
            del self._queues[sequence.client]

    def admit(self, sequence: Sequence) -> None:
        """Removes a sequence that starts to run, and charges its client for the prompt."""
        self._now = max(self._now, self.served[sequence.client])
        self.remove(sequence)
        self.spend(sequence.client, charge(sequence))

    def spend(self, client: str, tokens: float) -> None:
        """Charges a client for computed tokens."""
        self.served[client] = self.served.get(client, self._now) + tokens

    def _forget(self) -> None:
        """Forgets half of the clients that wait for nothing: those that were served least."""
        if len(self.served) - len(self._queues) > REMEMBERED:
            idle = sorted(self.served.keys() - self._queues.keys(), key=lambda client: self.served[client])
            for client in idle[: -REMEMBERED // 2]:
                del self.served[client]


Waiting = WaitingQueue | FairQueue


def charge(sequence: Sequence) -> int:
    """Tokens charged at admission: the prompt, once. Output tokens are charged as they are computed."""
    return 0 if sequence.num_preemptions else sequence.prompt_len
