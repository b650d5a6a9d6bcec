"""When waiting requests may be admitted: at any time (continuous), or in batches (dynamic, static)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jengine.core.scheduling_options import Batching
from jengine.scheduling.requests.sequence import Sequence


class Batches:
    """Holds requests back until they form a batch: `size` requests wait, or the oldest has waited `wait`
    seconds.

    dynamic: batches are admitted one after the other as slots become free. A batch contains the oldest
    waiting request and those whose lengths are closest to its length. static: a batch is admitted, in order
    of arrival, when all requests of the previous batch have finished.
    """

    def __init__(self, batching: Batching, size: int, wait: float) -> None:
        self.batching, self.size, self.wait = batching, size, wait
        self._held: dict[Sequence, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held)

    def hold(self, sequence: Sequence) -> bool:
        """Holds back a new request. Returns False if it may be admitted at any time."""
        if self.batching == "continuous":
            return False
        self._held[sequence] = None
        return True

    def drop(self, sequence: Sequence) -> bool:
        """Removes a request that has ended. Returns False if it is not held."""
        if sequence in self._held:
            del self._held[sequence]
            return True
        return False

    @property
    def forms_at(self) -> float:
        """Time on the scheduler's clock at which the held requests form a batch, if no others arrive; inf:
        none are held.
        """
        if not self._held:
            return math.inf
        return -math.inf if len(self._held) >= self.size else next(iter(self._held)).arrival + self.wait

    def take(self, now: float, waiting: int, running: int) -> list[Sequence]:
        """Returns the next batch, or an empty list if it is not ready.

        Args:
            waiting, running: numbers of unfinished requests of earlier batches.
        """
        if waiting or (self.batching == "static" and running) or now < self.forms_at:
            return []
        batch = (
            similar(list(self._held), self.size)
            if self.batching == "dynamic"
            else list(self._held)[: self.size]
        )
        for sequence in batch:
            del self._held[sequence]
        return batch


def similar(held: list[Sequence], size: int) -> list[Sequence]:
    """The first request, and those whose maximum length (prompt and output) is closest to its maximum."""
    nearest = sorted(
        held,
        key=lambda sequence: (sequence.family != held[0].family, abs(sequence.max_len - held[0].max_len)),
    )
    return sorted(nearest[:size], key=lambda sequence: sequence.number)
