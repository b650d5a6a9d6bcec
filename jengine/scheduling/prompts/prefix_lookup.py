"""Looks up prompts in the prefix cache, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator

from jengine.scheduling.costs.predictor import ChunkEnd, StepPredictor
from jengine.scheduling.pages.block_table import NO_HIT, Hit
from jengine.scheduling.requests.registry import Registry
from jengine.scheduling.requests.sequence import Sequence
from jengine.scheduling.step_plan import Windows, Work, pairs

REMEMBERED = 256  # hits


class PrefixLookup:
    """
    Attributes:
        queries, hits: prompt tokens looked up on the device, and found.
        host_queries, host_hits, host_declined: the rest: tokens looked up on the host, fetched from it, and
            recomputed because that is faster than fetching.
        resumptions: counts for preempted sequences; see Load.resumptions.
    """

    def __init__(self, registry: Registry, predictor: StepPredictor) -> None:
        self._blocks, self._windows = registry.blocks, registry.limits.windows
        self._composition, self._predictor = registry.composition, predictor
        self.queries = self.hits = 0
        self.host_queries = self.host_hits = self.host_declined = 0
        self.resumptions = 0, 0, 0
        self._version = 0  # of the index, for these hits, by a sequence's number and number of tokens
        self._hits: dict[tuple[int, int], Hit] = {}

    def match(self, sequence: Sequence) -> Hit:
        """Looks up a sequence.

        A request for prompt log probabilities, or for the mean of hidden states, must compute its whole
        prompt.
        """
        request = sequence.request
        if request.params.prompt_logprobs is not None or (
            request.pooling is not None and request.pooling.needs_all
        ):
            return NO_HIT
        if self._version != self._blocks.version or len(self._hits) >= REMEMBERED:
            self._version, self._hits = self._blocks.version, {}
        key = sequence.number, len(sequence.tokens)
        if (both := self._hits.get(key)) is None:  # the first waiting sequences are looked up in every step
            tokens, count, salt = sequence.keys, self._composition.prefilled(sequence), sequence.salt
            tokens = tokens[:count] if count < len(tokens) else tokens
            whole = () if sequence.prefix else sequence.whole  # keys stand for whole prompts
            hit = self._blocks.match(tokens, salt, whole)
            both = self._blocks.match_both(tokens, salt, hit, whole)
            if sequence.request.pages_from is None:
                both = self.or_fetch(hit, both, count)
            self._hits[key] = both
        return both

    def or_fetch(self, hit: Hit, longer: Hit, count: int) -> Hit:
        """Returns the longer hit if fetching its pages is predicted to be faster than computing them,
        otherwise `hit`. count: length of the prompt in tokens.
        """
        if not longer.fetches:
            return hit
        saved = self.compute_seconds(hit.tokens, count) - self.compute_seconds(longer.tokens, count)
        return (
            longer
            if self._predictor.costs.fetch_seconds(longer.fetches) < saved
            else hit._replace(from_host=longer.from_host)
        )

    def compute_seconds(self, start: int, end: int) -> float:
        """Predicted seconds to compute a prompt's tokens at [start, end) alone."""
        work = Work(attended=pairs(start, end - start, self._windows))
        return self._predictor.prompt_seconds(end - start) + self._predictor.costs.work_seconds(work)

    def note_hit(self, sequence: Sequence, tokens: int, now: float, hit: Hit = NO_HIT) -> None:
        """Records that `tokens` tokens of a sequence are not computed. hit: the cache hit, which may include
        host pages.
        """
        if self._blocks.prefix_caching:
            queries, fetched = self._composition.prefilled(sequence), hit.from_host if hit.fetches else 0
            self.queries += queries
            self.hits += tokens - fetched
            if self._blocks.tier is not None:
                self.host_queries += queries - (tokens - fetched)
                self.host_hits += fetched
                self.host_declined += hit.from_host - fetched
        if not sequence.scheduled:
            sequence.scheduled, sequence.num_cached = now, tokens

    def note_resumption(self, sequence: Sequence, hit: Hit) -> None:
        """Counts how a preempted sequence resumes: with cached pages, from the host, or recomputed."""
        missing = self._composition.prefilled(sequence) - hit.tokens
        cached, swapped, recomputed = self.resumptions
        if hit.fetches:
            swapped += 1
        elif missing <= self._composition.hit_grid(self._blocks.page_size):
            cached += 1
        else:
            recomputed += 1
        self.resumptions = cached, swapped, recomputed


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
