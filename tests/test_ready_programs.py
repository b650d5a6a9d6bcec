"""Tables with only some programs ready: steps always fit, and use the smallest ready program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jengine.table.program_table import VARIANTS, PoolKey, ProgramTable, SamplerKey, ScoreKey, TrunkKey
from jengine.table.ready_programs import ReadyPrograms, TableKey, by_use, first_needed

tables = st.builds(
    ProgramTable.build,
    max_num_seqs=st.integers(1, 70),
    max_num_batched_tokens=st.integers(16, 300),
    tile_size=st.sampled_from([4, 16]),
    page_buckets=st.sampled_from([(0,), (2, 8, 64)]),
    paged_rows=st.booleans(),
    single_row=st.booleans(),
    pooling=st.booleans(),
)


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
    assert not trunk.tiles or ScoreKey(trunk.tiles) in ready.scores()
    assert not trunk.tiles or not table.pooling or PoolKey(trunk.tiles) in {*first_needed(table), *more}


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
