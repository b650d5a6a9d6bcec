"""The finite table of static-shape programs: keys and bucket rules. Pure data.

A step's token axis is `rows + tiles * tile_size`: one token for each decoding sequence, then fixed tiles
of prompt chunks. The table is additive: decode-only trunks for every row bucket, mixed trunks for few,
and samplers by row count and variant. Scheduling picks from it; execution compiles it.

A batch-invariant table never mixes: one trunk for decode rows, one for prompt tiles, one sampler. So a token is always computed by
the same program, whatever runs beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from jengine.request import SamplingParams

Variant = Literal["greedy", "sample", "truncated", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "sample", "truncated", "full")  # each does all that those before it do


def sampler_variant(params: SamplingParams) -> Variant:
    """The cheapest variant that applies every parameter."""
    if params.logprobs is not None or params.penalizes or params.logit_bias or params.masks:
        return "full"
    truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    if truncates or params.min_tokens > 0:
        return "truncated"
    return "greedy" if params.greedy else "sample"


BATCH_INVARIANT = (0,)
MIN_ROWS = 8  # products of fewer rows are slow paths in XLA, and tensor cores have no use for them


@dataclass(frozen=True, slots=True, order=True)
class TrunkKey:
    """Embedding, layers and final norm over `rows` decode rows and `tiles` prompt tiles.

    `pages` is how many of a sequence's pages attention reads; 0 means each sequence's own count, known
    on the device only (a CPU loop, or a kernel that loops inside).
    """

    rows: int
    tiles: int
    pages: int = 0

    def __str__(self) -> str:
        return f"trunk[{self.rows}+{self.tiles}t" + (f",{self.pages}p]" if self.pages else "]")


@dataclass(frozen=True, slots=True, order=True)
class SamplerKey:
    """Final hidden states of `rows` rows to tokens."""

    rows: int
    variant: Variant

    def __str__(self) -> str:
        return f"sampler[{self.rows},{self.variant}]"


@dataclass(frozen=True, slots=True, order=True)
class ScoreKey:
    """Hidden states of a trunk's `tiles` prompt tiles to log probabilities of the tokens that follow."""

    tiles: int

    def __str__(self) -> str:
        return f"score[{self.tiles}t]"


@dataclass(frozen=True, slots=True, order=True)
class PoolKey:
    """Hidden states of a trunk's `tiles` prompt tiles to a sum for each tile."""

    tiles: int

    def __str__(self) -> str:
        return f"pool[{self.tiles}t]"


@dataclass(frozen=True, slots=True, order=True)
class BurstKey:
    """`steps` steps in a row of a trunk for decode rows and its sampler."""

    trunk: TrunkKey
    sampler: SamplerKey
    steps: int

    def __str__(self) -> str:
        return f"burst[{self.trunk},{self.sampler},{self.steps}]"


class Tokens(Protocol):
    """Tokens of one sequence that a step computes: see step_plan.Span."""

    length: int
    tokens: list[int] | None


class Tile(NamedTuple):
    """A program's tile: `length` tokens of a span, from `offset` on."""

    span: int
    offset: int
    length: int


class Placement(NamedTuple):
    """Where a step's spans lie on a program's token axis.

    Attributes:
        rows: how many spans have a row, the first ones.
        tiles: the others', in order.
    """

    rows: int
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class ProgramTable:
    """Sizes, in ascending order, from which every step's programs are picked."""

    row_buckets: tuple[int, ...]  # decode-only trunks
    mixed_row_buckets: tuple[int, ...]  # trunks that also take tiles; BATCH_INVARIANT: these take no rows
    tile_buckets: tuple[int, ...]
    tile_size: int  # tokens
    page_buckets: tuple[int, ...] = (0,)
    pooling: bool = False  # whether there are programs for embeddings
    steps: int = 1  # of a burst; 1: there are none
    sample_buckets: tuple[int, ...] = field(init=False, repr=False)  # row counts of samplers

    def __post_init__(self) -> None:
        """A step samples its decode rows and may finish a prompt in any tile. It never samples more than there are sequences."""
        if self.batch_invariant:
            object.__setattr__(self, "sample_buckets", self.row_buckets)
            return
        sums = {r + t for r in self.mixed_row_buckets for t in self.tile_buckets}
        over = max(sums)
        inside = {next((b for b in self.row_buckets if b >= s), over) for s in sums}
        object.__setattr__(self, "sample_buckets", tuple(sorted({*self.row_buckets, *inside})))

    @classmethod
    def build(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tile_size: int,
        page_buckets: tuple[int, ...] = (0,),
        single_row: bool = False,
        pooling: bool = False,
        steps: int = 1,
    ) -> ProgramTable:
        """Powers of two up to the limits; mixed trunks for the fewest and for the most rows.

        Args:
            single_row: a trunk for one row alone as well.
            pooling: programs for embeddings as well.
            steps: of bursts; 1: no programs for them.
        """
        rows = _powers(MIN_ROWS, max(max_num_seqs, MIN_ROWS))
        tiles = _powers(1, max(1, max_num_batched_tokens // tile_size))
        return cls((1, *rows) if single_row else rows, tuple(sorted({rows[0], rows[-1]})), tiles, tile_size, page_buckets, pooling, steps)

    @classmethod
    def build_batch_invariant(cls, *, max_num_seqs: int, tiles: int, tile_size: int, pooling: bool = False) -> ProgramTable:
        """One trunk for max_num_seqs decode rows, one for so many prompt tiles."""
        return cls((max(max_num_seqs, MIN_ROWS),), BATCH_INVARIANT, (tiles,), tile_size, pooling=pooling)

    @property
    def batch_invariant(self) -> bool:
        """Whether a step holds rows or tiles, never both, and there is one trunk for either."""
        return self.mixed_row_buckets == BATCH_INVARIANT

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those that there are samplers for. Where bits count that is one, since two programs may round differently."""
        return VARIANTS[-1:] if self.batch_invariant else VARIANTS

    @property
    def max_rows(self) -> int:
        return self.row_buckets[-1]

    @property
    def max_tiles(self) -> int:
        return self.tile_buckets[-1]

    def trunk(self, rows: int, tiles: int, pages: int = 0, samples: int = 0) -> TrunkKey:
        """The smallest trunk that holds a step of this many rows, tiles, pages a sequence and samples."""
        buckets, tiles = self.mixed_row_buckets if tiles else self.row_buckets, _fit(self.tile_buckets, tiles) if tiles else 0
        key = TrunkKey(_fit(buckets, rows), tiles, self.page_bucket(pages))
        if self.sample_rows(key) < samples:  # several samples of one prompt
            key = TrunkKey(next(b for b in buckets if self.sample_rows(TrunkKey(b, tiles)) >= samples), tiles, key.pages)
        return key

    def place(self, spans: Sequence[Tokens]) -> Placement:
        """A row for each span whose token is on the device, tiles for the others, which come after them."""
        rows, size, tiles = bisect_left(spans, True, key=lambda span: span.tokens is not None), self.tile_size, []
        for i, span in enumerate(spans[rows:], rows):
            tiles += [Tile(i, at, min(size, span.length - at)) for at in range(0, span.length, size)]
        return Placement(rows, tiles)

    def page_bucket(self, pages: int) -> int:
        return self.page_buckets[0] if len(self.page_buckets) == 1 else _fit(self.page_buckets, pages)

    def sampler(self, trunk: TrunkKey, variant: Variant) -> SamplerKey:
        """The cheapest that does all that this variant does."""
        return SamplerKey(self.sample_rows(trunk), variant if variant in self.variants else VARIANTS[-1])

    def sample_rows(self, trunk: TrunkKey) -> int:
        """How many hidden states a trunk hands to its sampler."""
        return self.max_rows if self.batch_invariant else _fit(self.sample_buckets, trunk.rows + trunk.tiles)

    def trunks(self) -> list[TrunkKey]:
        plain = [TrunkKey(r, 0, p) for r in self.row_buckets for p in self.page_buckets]
        mixed = [TrunkKey(r, t, p) for r in self.mixed_row_buckets for t in self.tile_buckets for p in self.page_buckets]
        return plain + mixed

    def samplers(self) -> list[SamplerKey]:
        return [SamplerKey(r, v) for r in self.sample_buckets for v in self.variants]

    def scores(self) -> list[ScoreKey]:
        return [ScoreKey(t) for t in self.tile_buckets]

    def pools(self) -> list[PoolKey]:
        return [PoolKey(t) for t in self.tile_buckets] if self.pooling else []

    def bursts(self) -> list[BurstKey]:
        """Of the samplers that leave nothing to the host."""
        if self.steps == 1:
            return []
        trunks = [TrunkKey(r, 0, p) for r in self.row_buckets for p in self.page_buckets]
        return [BurstKey(trunk, self.sampler(trunk, variant), self.steps) for trunk in trunks for variant in VARIANTS[:-1]]

    def tile_programs(self, tiles: int) -> list[ScoreKey | PoolKey]:
        """Those that take the hidden states of a trunk's tiles, for the requests that ask for it."""
        return [ScoreKey(tiles), *([PoolKey(tiles)] if self.pooling else [])] if tiles else []

    def tokens(self, key: TrunkKey) -> int:
        """Length of a step's token axis, padding included."""
        return key.rows + key.tiles * self.tile_size


def _powers(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low, ... and high itself."""
    out = [low]
    while out[-1] * 2 < high:
        out.append(out[-1] * 2)
    return (*out, high) if high > out[-1] else tuple(out)


def _fit(buckets: tuple[int, ...], value: int) -> int:
    at = bisect_left(buckets, value)
    if at == len(buckets):
        raise ValueError(f"{value} exceeds the largest bucket {buckets[-1]}")
    return buckets[at]
