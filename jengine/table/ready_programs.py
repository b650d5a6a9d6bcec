"""A table's usable programs: all, or first a few for any request while others are compiled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jengine.table.program_table import (
    VARIANTS,
    BurstKey,
    DraftKey,
    PoolKey,
    ProgramTable,
    SamplerKey,
    ScoreKey,
    TableKey,
    TrunkKey,
    Variant,
)


class ReadyPrograms:
    """The compiled and loaded subset of a program table. Picks a step's programs as ProgramTable does from
    the whole table.

    A trunk counts as ready once the full sampler of its samples is ready and, if it takes prompts, the scorer
    and the pooler of its tiles: these serve every request. With a draft model, it also needs a program that
    drafts for its rows. Steps stay within `max_rows` and `max_tiles`,
    which grow as programs become ready.

    Args:
        ready: keys of ready programs; None: all. They must include a trunk for prompts and one for decoding
            with at least as many rows.

    Attributes:
        max_rows: maximum number of running sequences.
        max_tiles: maximum number of prompt tiles in a step, beside any number of rows.
        tile_buckets: those of the table up to max_tiles.
        encoders: patches of the ready programs that encode images.
    """

    def __init__(self, table: ProgramTable, ready: Iterable[TableKey] | None = None) -> None:
        self.table, self.tile_size = table, table.tile_size
        self._keys: set[TableKey] = {*(table.all_keys() if ready is None else ready)}
        keys = self._keys
        self._drafts = [key for key in table.draft_keys() if key in keys]
        self._trunks = {key for key in keys if isinstance(key, TrunkKey) and self._serves(key)}
        self.encoders = tuple(key.patches for key in table.encoder_keys() if key in keys)
        self._chosen: dict[TrunkKey, TrunkKey] = {}  # keyed by the choice from the whole table
        serving = [key for key in self._trunks if key == table.longest(key.rows, key.tiles)]
        if table.batch_invariant:  # a trunk has either rows or tiles
            self.max_rows = max(key.rows for key in serving if not key.tiles)
            self.max_tiles = max(key.tiles for key in serving if key.tiles)
        else:
            plain = max((key.rows for key in serving if not key.tiles), default=0)
            self.max_rows = max(key.rows for key in serving if key.tiles and key.rows <= plain)
            self.max_tiles = max(key.tiles for key in serving if key.rows >= self.max_rows)
        self.tile_buckets = tuple(bucket for bucket in table.tile_buckets if bucket <= self.max_tiles)

    def _serves(self, trunk: TrunkKey) -> bool:
        full = SamplerKey(self.table.sample_rows(trunk), VARIANTS[-1])
        others = (*self.table.tile_programs(trunk.tiles), *self.table.row_programs(trunk.rows))
        return full in self._keys and all(key in self._keys for key in others)

    def trunk(self, rows: int, tiles: int, pages: int = 0, samples: int = 0, *, adapted: int = 0) -> TrunkKey:
        """The smallest ready trunk for a step with this many rows, tiles, pages per sequence and samples.
        adapted: the highest place of an adapter of its sequences; 0: none has one.
        """
        wanted = self.table.trunk(rows, tiles, pages, samples, adapted=adapted)
        if wanted in self._trunks:
            return wanted
        if wanted not in self._chosen:
            self._chosen[wanted] = min(
                (key for key in self._trunks if self._holds(key, wanted)),
                key=lambda key: (self.table.tokens(key), key.adapted),
            )
        return self._chosen[wanted]

    def covering(self, trunks: Sequence[TrunkKey]) -> TrunkKey | None:
        """The smallest ready trunk that can take the place of each of these; None: there is none."""
        return min(
            (key for key in self._trunks if all(self._holds(key, wanted) for wanted in trunks)),
            key=lambda key: (self.table.tokens(key), key),
            default=None,
        )

    def _holds(self, key: TrunkKey, wanted: TrunkKey) -> bool:
        enough = key.rows >= wanted.rows and key.tiles >= wanted.tiles and key.pages >= wanted.pages
        enough = enough and key.adapted >= wanted.adapted
        return enough and self.table.sample_rows(key) >= self.table.sample_rows(wanted)

    def sampler(self, trunk: TrunkKey, variant: Variant) -> SamplerKey:
        """The cheapest ready sampler that includes this variant."""
        rows = self.table.sample_rows(trunk)
        keys = (SamplerKey(rows, v) for v in VARIANTS[VARIANTS.index(variant) :])
        return next(key for key in keys if key in self._keys)

    def burst(self, trunk: TrunkKey, variant: Variant) -> BurstKey | None:
        """The burst of this trunk and variant, if its program is ready."""
        key = BurstKey(trunk, self.table.sampler(trunk, variant), self.table.steps)
        return key if key in self._keys else None

    def draft(self, rows: int, pages: int = 0) -> DraftKey:
        """The smallest ready program that drafts for this many sequences, of so many pages each."""
        return min(key for key in self._drafts if key.rows >= rows and (not key.pages or key.pages >= pages))

    def trunks(self) -> list[TrunkKey]:
        """Trunks that count as ready."""
        return [key for key in self.table.trunks() if key in self._trunks]

    def samplers(self) -> list[SamplerKey]:
        return [key for key in self.table.samplers() if key in self._keys]

    def bursts(self) -> list[BurstKey]:
        return [key for key in self.table.bursts() if key in self._keys]

    def drafts(self) -> list[DraftKey]:
        return [*self._drafts]

    def scores(self) -> list[ScoreKey]:
        passed = {self.table.passed_tiles(key.tiles) for key in self._trunks}
        return [key for key in self.table.scores() if key.tiles in passed]

    def pools(self) -> list[PoolKey]:
        return [PoolKey(key.tiles) for key in self.scores()] if self.table.pooling else []


class Demand(NamedTuple):
    """What running and waiting requests could use in a step.

    Attributes:
        rows: number of sequences.
        tiles: of their prompts that are not computed yet.
        variants: of their samplers.
    """

    rows: int
    tiles: int
    variants: tuple[Variant, ...] = (VARIANTS[-1],)


def first_needed(table: ProgramTable) -> list[TableKey]:
    """A small set that serves any request: a trunk with tiles, one without, and their full samplers. For a
    batch-invariant table, everything.

    The full sampler takes longer to compile than everything else. So if the trunk with tiles has few, the
    other one is the one whose steps have as many samples, if there is one.
    """
    few, mixed = _first_trunks(table)
    rows = table.sample_rows(mixed)
    decode = table.longest(rows, 0) if rows in table.row_buckets else few
    return [*_with_others(table, [mixed, decode], VARIANTS[-1:]), *table.encoder_keys()]


def by_use(table: ProgramTable) -> list[TableKey]:
    """All programs, the most useful first: one row, the most rows, their cheaper samplers, the most tiles. If
    an engine starts with the most rows, these come first.
    """
    if table.batch_invariant:
        return first_needed(table)
    fewest, all_rows = table.mixed_row_buckets[0], table.mixed_row_buckets[-1]
    few, many = table.tile_buckets[0], table.tile_buckets[-1]
    first, alone = _first_trunks(table), table.longest(table.row_buckets[0], 0)
    if table.first_tiles:
        soon = [*reversed(first), alone, table.longest(all_rows, many)]
    else:
        soon = [alone, table.longest(all_rows, 0), table.longest(all_rows, few)]
    rest = [
        table.longest(all_rows, many),
        table.longest(fewest, many),
        *sorted(table.trunks(), key=table.tokens),
    ]
    keys = _with_others(table, soon, VARIANTS[-1:])
    keys += _with_others(table, [*soon, *first, *rest], table.variants)
    return [*dict.fromkeys([*keys, *table.all_keys()])]


def by_demand(table: ProgramTable, missing: Collection[TableKey], demand: Demand) -> list[TableKey]:
    """The missing programs: first those that serve the demand in the fewest steps, then the others by use."""
    rows, tiles = min(demand.rows, table.max_rows), min(demand.tiles, table.max_tiles)
    beside = 0 if table.batch_invariant else rows
    steps = [(beside, tiles)] * bool(tiles) + [(rows, 0)] * bool(rows)
    trunks = [table.longest(key.rows, key.tiles) for key in (table.trunk(*step) for step in steps)]
    variants = {table.sampler(key, variant).variant for key in trunks for variant in demand.variants}
    keys = _with_others(table, trunks, VARIANTS[-1:])
    keys += _with_others(table, trunks, tuple(variant for variant in table.variants if variant in variants))
    return [key for key in dict.fromkeys([*keys, *by_use(table)]) if key in missing]


def _first_trunks(table: ProgramTable) -> list[TrunkKey]:
    """The trunks without and with tiles that an engine starts with."""
    rows = table.mixed_row_buckets[-1 if table.first_tiles else 0]
    least = max(table.whole_tiles, table.first_tiles)
    tiles = next(bucket for bucket in table.tile_buckets if bucket >= least)
    return [table.longest(rows or table.row_buckets[0], 0), table.longest(rows, tiles)]


def _with_others(
    table: ProgramTable, trunks: Iterable[TrunkKey], variants: tuple[Variant, ...]
) -> list[TableKey]:
    """Trunks, each followed by the programs that it needs, without duplicates."""
    keys: dict[TableKey, None] = {}
    for trunk in trunks:
        keys[trunk] = None
        keys.update(dict.fromkeys(SamplerKey(table.sample_rows(trunk), variant) for variant in variants))
        keys.update(dict.fromkeys(table.tile_programs(trunk.tiles)))
        keys.update(dict.fromkeys(table.row_programs(trunk.rows)))
    return [*keys]
