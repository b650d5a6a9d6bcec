"""Tables with only some programs ready: steps always fit, and use the smallest ready program."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.table.program_table import (
    VARIANTS,
    PoolKey,
    ProgramTable,
    SamplerKey,
    ScoreKey,
    TrunkKey,
    Variant,
)
from jengine.table.ready_programs import (
    Demand,
    ReadyPrograms,
    TableKey,
    by_demand,
    by_use,
    first_needed,
)

sizes: dict[str, Any] = {
    "max_num_seqs": st.integers(1, 70),
    "max_num_batched_tokens": st.integers(16, 300),
    "tile_size": st.sampled_from([4, 16]),
    "pooling": st.booleans(),
}
tables = st.builds(
    dataclasses.replace,
    st.builds(ProgramTable.build, **sizes, by_row=st.booleans())
    | st.builds(ProgramTable.build_for_gpu, **{**sizes, "max_num_seqs": st.integers(1, 600)}),
    page_buckets=st.sampled_from([(0,), (2, 8, 64)]),
    paged_rows=st.booleans(),
)
GPU = ProgramTable.build_for_gpu(max_num_seqs=256, max_num_batched_tokens=8192, tile_size=64)


def every(table: ProgramTable) -> list[TableKey]:
    return [*table.trunks(), *table.samplers(), *table.scores(), *table.pools()]


@given(table=tables)
def test_the_order_holds_every_program_once(table: ProgramTable) -> None:
    order, first = by_use(table), first_needed(table)
    assert sorted(map(str, order)) == sorted(map(str, every(table)))
    assert {*first} < {*order} and len(first) <= 5 + table.pooling


@given(table=tables, data=st.data())
def test_whatever_is_ready_serves_every_step_within_its_limits(
    table: ProgramTable, data: st.DataObject
) -> None:
    """With any further programs ready, in any order, a step within the limits has a trunk, and every variant
    has a sampler.
    """
    more = data.draw(st.sets(st.sampled_from(every(table))))
    ready = ReadyPrograms(table, [*first_needed(table), *more])
    rows, tiles = data.draw(st.integers(0, ready.max_rows)), data.draw(st.integers(0, ready.max_tiles))
    pages, samples = (
        data.draw(st.integers(0, table.page_buckets[-1])),
        data.draw(st.integers(0, ready.max_rows)),
    )
    trunk = ready.trunk(rows, tiles, pages, samples)
    assert trunk in ready.trunks() and trunk.rows >= rows and trunk.tiles >= tiles
    assert (trunk.pages >= pages or (not tiles and not table.paged_rows)) and table.sample_rows(
        trunk
    ) >= samples
    for variant in VARIANTS:
        sampler = ready.sampler(trunk, variant)
        assert sampler in ready.samplers() and sampler.rows == table.sample_rows(trunk)
        assert VARIANTS.index(sampler.variant) >= VARIANTS.index(variant)
    passed = table.passed_tiles(trunk.tiles)
    assert passed >= trunk.tiles and (not trunk.tiles or ScoreKey(passed) in ready.scores())
    assert not trunk.tiles or not table.pooling or PoolKey(passed) in {*first_needed(table), *more}


@given(table=tables, data=st.data())
def test_with_all_ready_it_picks_as_the_table_does(table: ProgramTable, data: st.DataObject) -> None:
    ready = ReadyPrograms(table)
    assert (ready.max_rows, ready.max_tiles, ready.tile_buckets) == (
        table.max_rows,
        table.max_tiles,
        table.tile_buckets,
    )
    rows, tiles = data.draw(st.integers(0, table.max_rows)), data.draw(st.integers(0, table.max_tiles))
    trunk = ready.trunk(rows, tiles, table.page_buckets[-1])
    assert trunk == table.trunk(rows, tiles, table.page_buckets[-1])
    assert [ready.sampler(trunk, v) for v in VARIANTS] == [table.sampler(trunk, v) for v in VARIANTS]


@given(table=tables)
def test_limits_grow_with_the_programs(table: ProgramTable) -> None:
    first = first_needed(table)
    order = [*first, *(key for key in by_use(table) if key not in first)]
    rows = [ReadyPrograms(table, order[:count]).max_rows for count in range(len(first), len(order) + 1)]
    assert rows == sorted(rows) and rows[-1] == table.max_rows


def test_a_trunk_without_its_full_sampler_does_not_count() -> None:
    table = ProgramTable.build(max_num_seqs=32, max_num_batched_tokens=512, tile_size=64)
    first = first_needed(table)
    assert first == [TrunkKey(8, 1), SamplerKey(16, "full"), ScoreKey(1), TrunkKey(16, 0)], (
        "they share the sampler"
    )
    ready = ReadyPrograms(table, [*first, TrunkKey(8, 0), TrunkKey(32, 0), TrunkKey(32, 1)])
    assert ready.max_rows == 8 and ready.trunk(1, 0) == TrunkKey(16, 0)
    assert ReadyPrograms(table, [*first, TrunkKey(8, 0), SamplerKey(8, "full")]).trunk(1, 0) == TrunkKey(8, 0)
    ready = ReadyPrograms(
        table,
        [
            *first,
            TrunkKey(32, 0),
            TrunkKey(32, 1),
            SamplerKey(32, "full"),
            SamplerKey(table.sample_rows(TrunkKey(32, 1)), "full"),
        ],
    )
    assert (
        ready.max_rows == 32
        and ready.trunk(17, 0) == TrunkKey(32, 0)
        and ready.sampler(TrunkKey(32, 0), "greedy").variant == "full"
    )
    with pytest.raises(ValueError, match="empty"):
        ReadyPrograms(table, first[:3])


def test_a_trunk_without_its_pooler_does_not_count() -> None:
    table = ProgramTable.build(max_num_seqs=32, max_num_batched_tokens=512, tile_size=64, pooling=True)
    first = first_needed(table)
    assert first[2:4] == [ScoreKey(1), PoolKey(1)]
    assert ReadyPrograms(table, [*first, TrunkKey(8, 2), ScoreKey(2), SamplerKey(16, "full")]).max_tiles == 1
    assert (
        ReadyPrograms(
            table, [*first, TrunkKey(8, 2), ScoreKey(2), SamplerKey(16, "full"), PoolKey(2)]
        ).max_tiles
        == 2
    )


def test_only_trunks_with_tiles_may_have_page_buckets() -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "tile_size": 16, "steps": 8}
    table = ProgramTable.build(**limits, page_buckets=(2, 8), paged_rows=False)
    assert {(bool(key.tiles), key.pages) for key in table.trunks()} == {(False, 0), (True, 2), (True, 8)}
    assert {key.trunk.pages for key in table.bursts()} == {0}
    assert table.trunk(3, 0, 7) == table.longest(8, 0) == TrunkKey(8, 0, 0)
    assert table.trunk(3, 1, 7) == table.longest(8, 1) == TrunkKey(8, 1, 8)


@given(
    build=st.sampled_from(["build", "build_batch_invariant"]),
    rows=st.integers(1, 40),
    tiles=st.integers(1, 8),
    data=st.data(),
)
def test_trunks_with_adapters_serve_steps_without_but_not_the_reverse(
    build: str, rows: int, tiles: int, data: st.DataObject
) -> None:
    """The first programs serve both. With all of them, steps without adapters have trunks without, unless a
    token's program must always be the same.
    """
    how = {"max_num_seqs": rows, "tile_size": 16, "adapters": 8}
    invariant = build == "build_batch_invariant"
    table = (
        ProgramTable.build_batch_invariant(tiles=tiles, **how)  # type: ignore[arg-type]
        if invariant
        else ProgramTable.build(max_num_batched_tokens=rows + 16 * tiles, **how)  # type: ignore[arg-type]
    )
    first, every = ReadyPrograms(table, first_needed(table)), ReadyPrograms(table)
    for ready in (first, every):
        count = data.draw(st.integers(0 if invariant else 1, 1))
        step = (count, 0) if count else (0, 1)
        for highest in range(9):
            trunk = ready.trunk(*step, adapted=highest)
            assert trunk.adapted >= highest
            if ready is every:
                assert trunk.adapted == (8 if highest > 2 or invariant else 2 if highest else 0)
    assert {key.adapted for key in table.trunks()} == ({8} if invariant else {0, 2, 8})
    assert {str(key) for key in by_use(table)} == {str(key) for key in table.all_keys()}


def test_a_cpu_has_trunks_between_powers_of_two_but_no_samplers() -> None:
    table = ProgramTable.build(max_num_seqs=64, max_num_batched_tokens=576, tile_size=64, by_row=True)
    assert table.row_buckets == (1, 4, 8, 12, 16, 24, 32, 48, 64) and table.sample_buckets == (
        1,
        8,
        16,
        32,
        64,
    )
    assert table.sampler(table.trunk(17, 0), "greedy") == SamplerKey(32, "greedy")
    assert table.sample_rows(table.trunk(60, 8)) == table.max_rows == 64  # a sample for each sequence
    few = ProgramTable.build(max_num_seqs=10, max_num_batched_tokens=576, tile_size=64, by_row=True)
    assert few.row_buckets == (1, 4, 8, 10) and few.sample_buckets == (1, 8, 10)


def test_the_table_of_a_gpu_is_small() -> None:
    """With the programs of other kinds (5) at most 25."""
    assert GPU.row_buckets == (16, 128, 256) and GPU.mixed_row_buckets == (16, 256)
    assert GPU.tile_buckets == (4, 16, 128) and {key.rows for key in GPU.samplers()} == {16, 128, 256}
    assert len(GPU.trunks()) == 9 and len(GPU.all_keys()) == 20
    long = ProgramTable.build_for_gpu(max_num_seqs=1000, max_num_batched_tokens=20_000, tile_size=64)
    assert long.row_buckets == (16, 128, 256, 512, 1000) and long.tile_buckets == (4, 16, 64, 312)
    assert ProgramTable.build_for_gpu(max_num_seqs=1, max_num_batched_tokens=72, tile_size=64).trunks() == [
        TrunkKey(8, 0),
        TrunkKey(8, 1),
    ]


@given(rows=st.integers(1, 3000), tokens=st.integers(64, 40_000), tile_size=st.sampled_from([16, 64, 128]))
def test_padding_of_a_gpu_costs_little(rows: int, tokens: int, tile_size: int) -> None:
    """Rows beyond those that are computed while weights are read are at most doubled, tiles at most 16 times
    as many.
    """
    table = ProgramTable.build_for_gpu(max_num_seqs=rows, max_num_batched_tokens=tokens, tile_size=tile_size)
    assert table.max_rows == max(rows, 8) and table.max_tiles == max(tokens // tile_size, 1)
    assert all(b <= 2 * a for a, b in itertools.pairwise(table.row_buckets) if a >= 128)
    assert table.row_buckets[0] <= 16
    assert table.tile_buckets[0] * tile_size <= 256
    assert all(b / a < 16 for a, b in itertools.pairwise(table.tile_buckets))


def test_a_gpu_serves_a_burst_and_a_stream_first() -> None:
    """The first programs take 256 rows and 1,024 prompt tokens a step. With one stream's, there are 6; five
    of other kinds precede them.
    """
    order = by_use(GPU)
    assert order[:4] == first_needed(GPU)
    ready = ReadyPrograms(GPU, order[:4])
    assert (ready.max_rows, ready.max_tiles) == (256, 16)
    assert ReadyPrograms(GPU, order[:6]).trunk(1, 0) == TrunkKey(16, 0)
    assert ReadyPrograms(GPU, order[:8]).max_tiles == GPU.max_tiles


def test_each_variant_has_the_cheapest_sampler_that_includes_it() -> None:
    chosen = {variant: GPU.sampler(TrunkKey(16, 0), variant).variant for variant in VARIANTS}
    assert chosen == {"greedy": "sample", "sample": "sample", "truncated": "truncated", "full": "full"}


@given(
    table=tables,
    rows=st.integers(0, 700),
    tiles=st.integers(0, 100),
    variant=st.sampled_from(VARIANTS),
    data=st.data(),
)
def test_what_waits_decides_what_is_compiled_next(
    table: ProgramTable, rows: int, tiles: int, variant: Variant, data: st.DataObject
) -> None:
    """All missing programs in some order; once those of the demand's trunks are there, its steps have their
    own programs.
    """
    missing = {*every(table)} - {*first_needed(table)} - data.draw(st.sets(st.sampled_from(every(table))))
    order = by_demand(table, missing, Demand(rows, tiles, (variant,)))
    assert {*order} == missing and len(order) == len(missing)
    rows, tiles = min(rows, table.max_rows), min(tiles, table.max_tiles)
    for wanted in table.trunk(rows, tiles), table.trunk(rows, 0):
        wanted = table.longest(wanted.rows, wanted.tiles)
        if not wanted.tiles and not rows:
            continue
        needs = {wanted, table.sampler(wanted, "full"), table.sampler(wanted, variant)}
        assert (needs & missing) <= {*order[: 2 * (3 + 1 + table.pooling)]}
