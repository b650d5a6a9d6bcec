"""Fair token shares among clients: the next request comes from the client that has been served least.

Each client has a virtual time: the number of prompt and output tokens computed for it. A client with nothing
waiting starts at the virtual time of the last admitted client, so idle time earns no credit. While two
clients both wait, their service differs by at most what can run at once (a Virtual Token Counter, as in Sheng
et al., "Fairness in Serving LLMs", 2024).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jengine.scheduling.requests.policy import WaitingQueue
from jengine.scheduling.requests.sequence import Sequence

# idle clients whose virtual time is kept; beyond that, those that would start at `_now` are forgotten
REMEMBERED = 4096


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
        """Raises ValueError if the sequence is not waiting here."""
        queue = self._queues.get(sequence.client)
        if queue is None:
            raise ValueError(f"request {sequence.request_id!r} is not waiting")
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
        """Forgets clients that would start at `_now` anyway."""
        if len(self.served) - len(self._queues) > REMEMBERED:
            self.served = {
                client: served
                for client, served in self.served.items()
                if client in self._queues or served > self._now
            }


def charge(sequence: Sequence) -> int:
    """Tokens charged at admission: the prompt, once. Output tokens are charged as they are computed."""
    return 0 if sequence.num_preemptions else sequence.prompt_len
