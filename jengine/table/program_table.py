"""The finite table of static-shape programs: keys and bucket rules. Pure data.

A step's token axis is `rows + tiles * tile_size`: one token for each decoding sequence, then fixed-size tiles
of prompt chunks. The table is additive: decode-only trunks for every row bucket, mixed trunks for a few, and
samplers by row count and variant. Scheduling picks from it; execution compiles it.

A GPU's table has few buckets (`build_for_gpu`), since its programs take long to compile, and padding costs
little.

A batch-invariant table has no mixed trunks: one trunk for decode rows, one for prompt tiles, one sampler. So
a token is always computed by the same program, whatever other requests run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from jengine.core.request import SamplingParams
from jengine.core.speculation import MOST_DRAFTS as MOST_DRAFTS
from jengine.core.speculation import MOST_STATES as MOST_STATES

SWAPS = 16  # pages that one call moves between device and host


def pages_of(tokens: int, page_size: int) -> int:
    """Number of pages that hold this many tokens."""
    return -(-tokens // page_size)


def most_pages(tokens: int, window: int | None, page_size: int, ahead: int) -> int:
    """Maximum number of pages that a sequence holds in a cache group, until it has `tokens` tokens.

    Args:
        window: tokens that a query attends to, its own included; earlier pages are released. None: all are
            kept.
        ahead: tokens computed at a time.
    """
    every = pages_of(tokens, page_size)
    return every if window is None else min(every, pages_of(window - 1 + ahead, page_size) + 1)


Variant = Literal["greedy", "sample", "truncated", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "sample", "truncated", "full")  # each includes the previous ones


def sampler_variant(params: SamplingParams) -> Variant:
    """The cheapest variant that applies every parameter."""
    if params.logprobs is not None or params.penalizes or params.logit_bias or params.masks:
        return "full"
    truncates = not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    if truncates or params.min_tokens > 0:
        return "truncated"
    return "greedy" if params.greedy else "sample"


BATCH_INVARIANT = (0,)
MIN_ROWS = 8  # XLA is slow for products with fewer rows, and tensor cores cannot use them

# Buckets of a GPU. `python -m benchmarks.gpu_table` simulates what each is worth.
FEW_ROWS, FEW_TOKENS = 16, 256  # the smallest buckets of rows, and of prompt tokens
# Multiplying the weights with so many rows takes a GPU hardly longer than reading them: half of the rows for
# which both take equally long, 140 to 300 on A100s, H100s and H200s.
READING_ROWS = 128
APART = 4  # ratio of neighbouring tile buckets, at least
BURST_TOKENS = 1024  # prompt tokens of a step that reaches most of a GPU's rate
GPU_VARIANTS: tuple[Variant, ...] = VARIANTS[1:]  # "sample" costs hardly more than "greedy"


@dataclass(frozen=True, slots=True, order=True)
class TrunkKey:
    """Embedding, layers and final norm over `rows` decode rows and `tiles` prompt tiles.

    `pages` is the number of a sequence's pages that attention reads. 0 means each sequence's own number,
    which only the device knows (a loop on a CPU, or in the kernel). `adapted` is how many places of LoRA
    adapters it computes too, from the first; it serves rows without adapters as well.
    """

    rows: int
    tiles: int
    pages: int = 0
    adapted: int = 0

    def __str__(self) -> str:
        more = f",{self.pages}p" if self.pages else ""
        return f"trunk[{self.rows}+{self.tiles}t{more}{f',{self.adapted}lora' if self.adapted else ''}]"


@dataclass(frozen=True, slots=True, order=True)
class SamplerKey:
    """Samples tokens from the final hidden states of `rows` rows."""

    rows: int
    variant: Variant

    def __str__(self) -> str:
        return f"sampler[{self.rows},{self.variant}]"


@dataclass(frozen=True, slots=True, order=True)
class ScoreKey:
    """Scores the tokens that follow a trunk's `tiles` prompt tiles, from their hidden states."""

    tiles: int

    def __str__(self) -> str:
        return f"score[{self.tiles}t]"


@dataclass(frozen=True, slots=True, order=True)
class PoolKey:
    """Sums the hidden states of each of a trunk's `tiles` prompt tiles."""

    tiles: int

    def __str__(self) -> str:
        return f"pool[{self.tiles}t]"


@dataclass(frozen=True, slots=True, order=True)
class BurstKey:
    """`steps` consecutive steps, each a trunk for decode rows and its sampler."""

    trunk: TrunkKey
    sampler: SamplerKey
    steps: int

    def __str__(self) -> str:
        return f"burst[{self.trunk},{self.sampler},{self.steps}]"


@dataclass(frozen=True, slots=True, order=True)
class DraftKey:
    """A draft model proposes the next `tokens` tokens of up to `rows` sequences. `pages`: see TrunkKey."""

    rows: int
    tokens: int
    pages: int = 0

    def __str__(self) -> str:
        return f"draft[{self.rows},{self.tokens}" + (f",{self.pages}p]" if self.pages else "]")


@dataclass(frozen=True, slots=True, order=True)
class EncoderKey:
    """Encodes parts of images that have up to `patches` patches together."""

    patches: int

    def __str__(self) -> str:
        return f"encoder[{self.patches}]"


TableKey = TrunkKey | SamplerKey | ScoreKey | PoolKey | BurstKey | DraftKey | EncoderKey


class Tokens(Protocol):
    """Tokens of one sequence that a step computes; see step_plan.Span."""

    length: int
    tokens: list[int] | None
    following: list[int] | None


class Tile(NamedTuple):
    """One tile of a program: `length` tokens of a span, from `offset` on."""

    span: int
    offset: int
    length: int


class Placement(NamedTuple):
    """The positions of a step's spans on a program's token axis.

    Attributes:
        rows: number of rows.
        tiles: tiles of the spans that have no rows, in order.
        on_rows: number of spans that have rows; these come first.
    """

    rows: int
    tiles: list[Tile]
    on_rows: int


@dataclass(frozen=True, slots=True)
class ProgramTable:
    """Bucket sizes, in ascending order, that determine every step's programs."""

    row_buckets: tuple[int, ...]  # decode-only trunks
    # trunks that also take tiles; with batch invariance, these take no rows
    mixed_row_buckets: tuple[int, ...]
    tile_buckets: tuple[int, ...]
    tile_size: int  # tokens
    page_buckets: tuple[int, ...] = (0,)
    # whether trunks without tiles have page buckets too; False: only attention of tiles needs them
    paged_rows: bool = True
    pooling: bool = False  # whether there are programs for embeddings
    steps: int = 1  # steps of a burst; 1: no bursts
    drafts: int = 0  # tokens that a draft model proposes for a sequence; 0: there is none
    adapters: int = 0  # places of adapters, for which there are trunks and bursts
    encoders: tuple[int, ...] = ()  # patches of the programs that encode images
    # tiles that every step with tiles must be able to hold: those of an image whose tokens see each other
    whole_tiles: int = 1
    # tiles of the trunk that an engine starts with, beside the most rows; 0: it starts with few of both
    first_tiles: int = 0
    variants: tuple[Variant, ...] = VARIANTS  # of samplers; the last one is "full"
    # row counts of samplers, and of programs of a draft model; empty: row_buckets
    sample_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_buckets", self.sample_buckets or self.row_buckets)
        if self.batch_invariant:  # two variants may round differently
            object.__setattr__(self, "variants", VARIANTS[-1:])

    @classmethod
    def build(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tile_size: int,
        by_row: bool = False,
        **more: Any,
    ) -> ProgramTable:
        """Powers of two up to the limits; mixed trunks for the fewest and for the most rows.

        Args:
            by_row: whether a step costs nearly in proportion to its rows, as on a CPU. Then there are trunks
                for 1, 4, 12, 24, 48, ... rows, too, of which all but 1 share the next samplers.
            more: other fields of the class, for any table.
        """
        samples = rows = _powers(MIN_ROWS, max(max_num_seqs, MIN_ROWS))
        tiles = _powers(1, max(1, max_num_batched_tokens // tile_size))
        mixed = tuple(sorted({rows[0], rows[-1]}))
        if by_row:
            samples = 1, *rows
            between = {count * 3 // 2 for count in rows[:-1]}
            rows = tuple(sorted({1, MIN_ROWS // 2, *rows, *(count for count in between if count < rows[-1])}))
        return cls(rows, mixed, tiles, tile_size, sample_buckets=samples, **more)

    @classmethod
    def build_for_gpu(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, tile_size: int, **more: Any
    ) -> ProgramTable:
        """Less than half of the programs of `build`. The first ones serve many requests.

        Rows: few, as many as take no longer than reading the weights, and from there powers of two. Tiles:
        factors of at least APART.
        """
        max_rows, most_tiles = max(max_num_seqs, MIN_ROWS), max(1, max_num_batched_tokens // tile_size)
        few = min(FEW_ROWS, max_rows)
        rows = {few, *(_powers(READING_ROWS, max_rows) if max_rows > READING_ROWS else (max_rows,))}
        tiles = [min(max(FEW_TOKENS // tile_size, 1), most_tiles)]
        while tiles[-1] * APART**2 <= most_tiles:
            tiles.append(tiles[-1] * APART)
        tiles = sorted({*tiles, most_tiles})
        first = next((count for count in tiles if count * tile_size >= BURST_TOKENS), most_tiles)
        buckets = tuple(sorted(rows)), tuple(sorted({few, max_rows})), tuple(tiles)
        return cls(*buckets, tile_size, first_tiles=first, variants=GPU_VARIANTS, **more)

    @classmethod
    def build_batch_invariant(
        cls, *, max_num_seqs: int, tiles: int, tile_size: int, **more: Any
    ) -> ProgramTable:
        """One trunk for max_num_seqs decode rows, one for `tiles` prompt tiles."""
        return cls((max(max_num_seqs, MIN_ROWS),), BATCH_INVARIANT, (tiles,), tile_size, **more)

    @property
    def batch_invariant(self) -> bool:
        """Whether a step holds rows or tiles but never both, with one trunk for each."""
        return self.mixed_row_buckets == BATCH_INVARIANT

    @property
    def max_rows(self) -> int:
        return self.row_buckets[-1]

    @property
    def max_tiles(self) -> int:
        return self.tile_buckets[-1]

    @property
    def kinds_of_trunks(self) -> tuple[int, ...]:
        """How many places of adapters trunks compute: none, all, and a quarter of four or more. With batch
        invariance there is only one kind, since two programs may round differently.
        """
        if not self.adapters or self.batch_invariant:
            return (self.adapters,)
        few = self.adapters // 4
        return (0, few, self.adapters) if few else (0, self.adapters)

    def trunk(self, rows: int, tiles: int, pages: int = 0, samples: int = 0, *, adapted: int = 0) -> TrunkKey:
        """The smallest trunk for so many rows, tiles, pages a sequence, samples and places of adapters."""
        adapted = _fit(self.kinds_of_trunks, adapted)
        buckets, tiles = (
            self.mixed_row_buckets if tiles else self.row_buckets,
            _fit(self.tile_buckets, tiles) if tiles else 0,
        )
        key = TrunkKey(_fit(buckets, rows), tiles, self.page_bucket(pages, tiles), adapted)
        if self.sample_rows(key) < samples:  # several samples of one prompt
            more = next(b for b in buckets if self.sample_rows(TrunkKey(b, tiles)) >= samples)
            key = TrunkKey(more, tiles, key.pages, adapted)
        return key

    def place(self, spans: Sequence[Tokens]) -> Placement:
        """Assigns rows to the spans without `tokens`, one for their first token and one for each of those
        that follow it, and tiles to the other spans, which come last.
        """
        on_rows, size, tiles = (
            bisect_left(spans, True, key=lambda span: span.tokens is not None),
            self.tile_size,
            [],
        )
        for i, span in enumerate(spans[on_rows:], on_rows):
            tiles += [Tile(i, at, min(size, span.length - at)) for at in range(0, span.length, size)]
        further = sum([len(span.following) for span in spans[:on_rows] if span.following])
        return Placement(on_rows + further, tiles, on_rows)

    def page_bucket(self, pages: int, tiles: int) -> int:
        """The smallest page bucket of trunks with or without tiles for so many pages of a sequence."""
        buckets = self._page_buckets(tiles)
        return buckets[0] if len(buckets) == 1 else _fit(buckets, pages)

    def longest(self, rows: int, tiles: int) -> TrunkKey:
        """The trunk with these buckets for any sequences, of any length and with any adapters."""
        return TrunkKey(rows, tiles, self._page_buckets(tiles)[-1], self.kinds_of_trunks[-1])

    def _page_buckets(self, tiles: int) -> tuple[int, ...]:
        return self.page_buckets if tiles or self.paged_rows else (0,)

    def sampler(self, trunk: TrunkKey, variant: Variant) -> SamplerKey:
        """The cheapest sampler that includes this variant."""
        rank = VARIANTS.index(variant)
        cheapest = next(known for known in self.variants if VARIANTS.index(known) >= rank)
        return SamplerKey(self.sample_rows(trunk), cheapest)

    def sample_rows(self, trunk: TrunkKey) -> int:
        """Number of hidden states that a trunk passes to its sampler. A prompt may end in any tile, but the
        samples of a step are at most the rows of the largest trunk: one for each sequence, and drafts.
        """
        if self.batch_invariant:
            return self.max_rows
        return _fit(self.sample_buckets, min(trunk.rows + trunk.tiles, self.max_rows))

    def all_keys(self) -> list[TableKey]:
        """Keys of all kinds of programs that the scheduler picks."""
        keys: list[TableKey] = [*self.trunks(), *self.samplers(), *self.scores(), *self.pools()]
        return [*keys, *self.bursts(), *self.draft_keys(), *self.encoder_keys()]

    def trunks(self) -> list[TrunkKey]:
        plain = [(r, 0, p) for r in self.row_buckets for p in self._page_buckets(0)]
        mixed = [
            (r, t, p) for r in self.mixed_row_buckets for t in self.tile_buckets for p in self.page_buckets
        ]
        return [TrunkKey(*sizes, adapted) for adapted in self.kinds_of_trunks for sizes in plain + mixed]

    def samplers(self) -> list[SamplerKey]:
        return [SamplerKey(r, v) for r in self.sample_buckets for v in self.variants]

    def scores(self) -> list[ScoreKey]:
        return [ScoreKey(t) for t in self.tile_buckets if t >= self.first_tiles]

    def pools(self) -> list[PoolKey]:
        return [PoolKey(key.tiles) for key in self.scores()] if self.pooling else []

    def bursts(self) -> list[BurstKey]:
        """Keys of bursts, for the samplers that do not need the host."""
        if self.steps == 1:
            return []
        trunks = [key for key in self.trunks() if not key.tiles]
        return [
            BurstKey(trunk, self.sampler(trunk, variant), self.steps)
            for trunk in trunks
            for variant in self.variants[:-1]
        ]

    def draft_keys(self) -> list[DraftKey]:
        """Keys of programs of the draft model, if there is one."""
        pages = self._page_buckets(0)
        return [DraftKey(r, self.drafts, p) for r in self.sample_buckets for p in pages if self.drafts]

    def encoder_keys(self) -> list[EncoderKey]:
        return [EncoderKey(patches) for patches in self.encoders]

    def row_programs(self, rows: int) -> list[DraftKey]:
        """Programs that propose tokens for all rows of a trunk, whatever their sequences' lengths."""
        if not rows or not self.drafts:
            return []
        return [DraftKey(_fit(self.sample_buckets, rows), self.drafts, self._page_buckets(0)[-1])]

    def tile_programs(self, tiles: int) -> list[ScoreKey | PoolKey]:
        """Programs that process the hidden states of a trunk's tiles, for requests that need them."""
        passed = self.passed_tiles(tiles)
        return [ScoreKey(passed), *([PoolKey(passed)] if self.pooling else [])] if tiles else []

    def passed_tiles(self, tiles: int) -> int:
        """Tiles of hidden states that a trunk passes on, with padding: small trunks share programs."""
        return max(tiles, self.first_tiles) if tiles else 0

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
