"""When waiting requests may be admitted: at any time (continuous), or in batches (dynamic, static); and what
a step may combine and where prompts may be cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jengine.core.scheduling_options import Batching
from jengine.scheduling.pages.block_table import next_range, outside
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
        """Time on the clock at which held requests form a batch if no others arrive; inf: none are held."""
        if not self._held:
            return math.inf
        return -math.inf if len(self._held) >= self.size else next(iter(self._held)).arrival + self.wait

    def take(self, now: float, waiting: int, running: int) -> list[Sequence]:
        """Returns the next batch, or an empty list if it is not ready. waiting, running: numbers of
        unfinished requests of earlier batches.
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


class Composition:
    """Decode rows and prompt tiles share steps. A resumed sequence prefills all of its known tokens.

    Attributes:
        apart: whether a step holds either rows or tiles, never both.
    """

    apart = False

    def prefilled(self, sequence: Sequence) -> int:
        """Number of a sequence's known tokens that are computed in tiles; rows compute the others."""
        return len(sequence.tokens)

    def end(self, sequence: Sequence, start: int, end: int, last: int) -> int:
        """Where a chunk from `start` on ends, given room up to `end` and tokens to prefill up to `last`; at
        most `start` if there is too little room.
        """
        return outside(sequence.whole, end)

    def hit_grid(self, page_size: int) -> int:
        """Prefix hits are multiples of this number of tokens."""
        return page_size

    @property
    def prompts_first(self) -> bool:
        """Whether the next step plans tiles before it considers rows."""
        return False

    def note(self, rows: int, tiles: int) -> None:
        """Records the rows and tiles of a planned step."""


class BatchInvariant(Composition):
    """Computes every token with one program at a place that depends on its request alone, so its bits never
    change.

    - Steps never mix rows and tiles.
    - Tiles begin and end at absolute multiples of the tile size, or at the prompt's end; so do hits. An image
      whose tokens see each other starts a new tile.
    - Prompt tokens are computed in tiles, generated tokens in rows. A resumed sequence recomputes its
    generated
      tokens in rows. The prefix cache holds only prompts: an earlier answer that becomes part of a prompt is
      computed again, in tiles.

    Prompts come first, with at most `budget` tokens between two steps of rows, so running streams advance.

    Args:
        budget: tokens, at least one tile.
    """

    apart = True

    def __init__(self, tile_size: int, budget: int) -> None:
        self._tile_size, self._budget = tile_size, budget
        self._spent = 0  # prompt tokens since the last step of rows

    def prefilled(self, sequence: Sequence) -> int:
        return sequence.prompt_len

    def end(self, sequence: Sequence, start: int, end: int, last: int) -> int:
        size, stop = self._tile_size, last
        if (whole := next_range(sequence.whole, start)) is not None:
            if whole[0] == start:
                return whole[1] if end >= whole[1] else start
            stop = whole[0]
        if start % size:  # behind an image
            stop = min(stop, -(-start // size) * size)
        return stop if end >= stop else end // size * size

    def hit_grid(self, page_size: int) -> int:
        return math.lcm(page_size, self._tile_size)

    @property
    def prompts_first(self) -> bool:
        return self._spent + self._tile_size <= self._budget

    def note(self, rows: int, tiles: int) -> None:
        self._spent = 0 if rows else self._spent + tiles * self._tile_size
