"""When waiting requests may be admitted: at any time (continuous), or in batches (dynamic, static)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jengine.scheduling.options import Batching
from jengine.scheduling.sequence import Sequence


class Batches:
    """Holds requests back until they form a batch: `size` of them wait, or the one that came first has waited `wait` seconds.

    dynamic: one batch after the other is admitted as slots become free. Of those that wait, the first takes along the ones whose
    lengths are most like its own. static: a batch is admitted when all of the one before has ended, in the order of arrival.
    """

    def __init__(self, batching: Batching, size: int, wait: float) -> None:
        self.batching, self.size, self.wait = batching, size, wait
        self._held: dict[Sequence, None] = {}  # in the order of their arrival

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._held)

    def hold(self, sequence: Sequence) -> bool:
        """Keeps a new request. False: it may be admitted at any time."""
        if self.batching == "continuous":
            return False
        self._held[sequence] = None
        return True

    def drop(self, sequence: Sequence) -> bool:
        """A request ends. False where it is not held."""
        if sequence in self._held:
            del self._held[sequence]
            return True
        return False

    @property
    def forms_at(self) -> float:
        """When the requests that are held form a batch, if nothing else comes: seconds on the scheduler's clock; inf: there are none."""
        if not self._held:
            return math.inf
        return -math.inf if len(self._held) >= self.size else next(iter(self._held)).arrival + self.wait

    def take(self, now: float, waiting: int, running: int) -> list[Sequence]:
        """The next batch, once it has formed and its turn has come.

        Args:
            waiting, running: requests of batches before.
        """
        if waiting or (self.batching == "static" and running) or now < self.forms_at:
            return []
        batch = similar(list(self._held), self.size) if self.batching == "dynamic" else list(self._held)[: self.size]
        for sequence in batch:
            del self._held[sequence]
        return batch


def similar(held: list[Sequence], size: int) -> list[Sequence]:
    """The first, and the others whose most tokens, prompt and output together, are nearest to its own."""
    nearest = sorted(held, key=lambda sequence: (sequence.family != held[0].family, abs(sequence.max_len - held[0].max_len)))
    return sorted(nearest[:size], key=lambda sequence: sequence.number)
