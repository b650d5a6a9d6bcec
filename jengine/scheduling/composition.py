"""What a step may compute together, and where prompts may be cut: anything, or only what leaves a token's bits as they are."""

from __future__ import annotations

import math

from jengine.scheduling.sequence import Sequence


class Composition:
    """Decode rows and prompt tiles share steps. A resumed sequence is prefilled, with all that is known of it.

    Attributes:
        apart: a step holds rows or tiles, never both.
    """

    apart = False

    def prefilled(self, sequence: Sequence) -> int:
        """How many of a sequence's known tokens are computed in tiles; rows compute what follows."""
        return len(sequence.tokens)

    def end(self, end: int, last: int) -> int:
        """Where a chunk ends for which there is room up to `end`, of tokens that are prefilled up to `last`."""
        return end

    def hit_grid(self, page_size: int) -> int:
        """Tokens of which a hit is a multiple."""
        return page_size

    @property
    def prompts_first(self) -> bool:
        """Whether the next step takes tiles before it looks for rows."""
        return False

    def note(self, rows: int, tiles: int) -> None:
        """A step of these was planned."""


class BatchInvariant(Composition):
    """Every token is computed by one program at a place that its request alone decides, so its bits never change.

    - Steps never mix rows and tiles.
    - Tiles begin and end at absolute multiples of the tile size, or at the prompt's end; so do hits.
    - A prompt's tokens are computed in tiles, generated ones in rows. A resumed sequence repeats its own in rows, and the
      prefix cache holds prompts alone: an answer that comes back within a prompt is computed again, in tiles.

    Prompts come first, `budget` tokens at most between two steps of rows, so that running streams go on.

    Args:
        budget: tokens, at least one tile.
    """

    apart = True

    def __init__(self, tile_size: int, budget: int) -> None:
        self._tile_size, self._budget = tile_size, budget
        self._spent = 0  # since the last step of rows

    def prefilled(self, sequence: Sequence) -> int:
        return sequence.prompt_len

    def end(self, end: int, last: int) -> int:
        return end if end == last else end // self._tile_size * self._tile_size

    def hit_grid(self, page_size: int) -> int:
        return math.lcm(page_size, self._tile_size)

    @property
    def prompts_first(self) -> bool:
        return self._spent + self._tile_size <= self._budget

    def note(self, rows: int, tiles: int) -> None:
        self._spent = 0 if rows else self._spent + tiles * self._tile_size
