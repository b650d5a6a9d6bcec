"""Prompt tiles that a step could compute."""

from __future__ import annotations

from jengine.scheduling.work import Windows, pairs


class PendingTiles:
    """Chunks of prompts in the order in which they would be computed.

    Attributes:
        count: total number of tiles.
        longest: number of tokens of the longest of their sequences after the step.
    """

    def __init__(self, tile_size: int, windows: Windows) -> None:
        self.tile_size, self.windows = tile_size, windows
        self.count = self.longest = 0
        self._chunks: list[tuple[int, int]] = []

    def add(self, start: int, tokens: int, limit: int) -> None:
        """Adds a prompt's tokens from `start` on, until there are `limit` tiles in total."""
        end = min(start + (limit - self.count) * self.tile_size, tokens)
        if end > start:
            self._chunks.append((start, end))
            self.count += -(-(end - start) // self.tile_size)
            self.longest = max(self.longest, end)

    def attended(self, tiles: int) -> int:
        """Number of (query, key) pairs of the first `tiles` tiles; see Work."""
        total = 0
        for start, end in self._chunks:
            if tiles <= 0:
                break
            end = min(end, start + tiles * self.tile_size)
            total += pairs(start, end - start, self.windows)
            tiles -= -(-(end - start) // self.tile_size)
        return total
