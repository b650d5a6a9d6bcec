"""Prompt tiles that a step could compute."""

from __future__ import annotations

from collections.abc import Iterator

from jengine.scheduling.costs.rows_or_tiles import ChunkEnd
from jengine.scheduling.work import Windows, pairs


class PendingTiles:
    """Chunks of prompts in the order in which they would be computed.

    Attributes:
        count: total number of tiles.
        least: tiles that the first chunk needs at once.
        longest: number of tokens of the longest of their sequences after the step.
    """

    def __init__(self, tile_size: int, windows: Windows) -> None:
        self.tile_size, self.windows = tile_size, windows
        self.count = self.longest = self.least = 0
        self._chunks: list[tuple[int, int, bool]] = []

    def add(self, start: int, end: int, at_once: int = 1, in_tiles: bool = False) -> None:
        """Adds a prompt's tokens at [start, end).

        Args:
            at_once: how many of the first must be computed together.
            in_tiles: whether all of them must lie in tiles.
        """
        if not self._chunks:
            self.least = -(-at_once // self.tile_size)
        self._chunks.append((start, end, in_tiles))
        self.count += -(-(end - start) // self.tile_size)
        self.longest = max(self.longest, end)

    def attended(self, tiles: int) -> int:
        """Number of (query, key) pairs of the first `tiles` tiles; see Work."""
        return sum([pairs(start, end - start, self.windows) for start, end, _ in self._first(tiles)])

    def ends(self, tiles: int) -> list[ChunkEnd]:
        """The tokens that do not fill a tile in chunks of the first `tiles` tiles, sorted by their number."""
        return sorted(
            [
                ChunkEnd(rest, end - rest)
                for start, end, in_tiles in self._first(tiles)
                if not in_tiles and (rest := (end - start) % self.tile_size)
            ]
        )

    def _first(self, tiles: int) -> Iterator[tuple[int, int, bool]]:
        """Chunks that the first `tiles` tiles compute."""
        for start, end, in_tiles in self._chunks:
            if tiles <= 0:
                return
            end = min(end, start + tiles * self.tile_size)
            yield start, end, in_tiles
            tiles -= -(-(end - start) // self.tile_size)
